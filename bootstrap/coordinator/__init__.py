"""The seed node at work: it opens one stage after the other, grants terms, judges rounds, cuts shards."""
