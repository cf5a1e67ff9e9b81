"""`dipaco-peer service`: the volunteer as a systemd user unit."""
