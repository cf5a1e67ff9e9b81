"""The public leaderboard: what module versions there are, how each came to be, and whose work is in it.

Nothing here has a key that counts, and nothing writes to the swarm: anybody can run it.
"""
