"""Whether anything grows while a swarm runs for long: memory, files, sockets, shared memory, disk, threads, records."""
