"""When a coordinator's host is lost: backups, a second seed node, and the way back into a run that went on."""
