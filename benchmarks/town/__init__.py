"""A town of homes behind routers, in network namespaces: what tests and the benchmark of relays run in."""
