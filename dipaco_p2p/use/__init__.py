"""A run put to use: its newest versions, from a coordinator's folder or a live swarm, and its tokenizer."""
