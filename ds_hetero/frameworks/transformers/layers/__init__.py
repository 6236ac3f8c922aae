"""Layers of transformers' models that see more than their own tokens, and what each needs on a shard."""
