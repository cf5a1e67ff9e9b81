"""What a peer pays for the swarm it is in, and whether that grows with the number of peers."""
