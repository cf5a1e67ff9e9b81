"""The method: model, routing, shards, inner and outer steps, and their bytes. Pure; knows no peer, clock or network."""
