"""How a run begins: from sequences of tokens to signed stages, with routers and shards."""
