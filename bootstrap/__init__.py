"""The coordinator program: corpus, tokenizer and shards, genesis, seed node, evaluator, command line."""
