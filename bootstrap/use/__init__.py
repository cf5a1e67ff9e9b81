"""A trained run, read: text from a prompt, or one path as a checkpoint."""
