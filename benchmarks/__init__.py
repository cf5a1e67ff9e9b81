"""Each benchmark is one command, prints a table, and writes JSON on request: `python -m benchmarks.NAME`."""
