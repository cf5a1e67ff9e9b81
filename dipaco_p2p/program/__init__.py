"""One process of ours on a machine: its console, files, tasks and figures."""
