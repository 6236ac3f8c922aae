"""Pipelines of unequal stages over unequal devices: the search over blocks, layers and micro-batches. No torch."""
