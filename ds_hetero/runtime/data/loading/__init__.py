"""Loaders: batches that are read once, in the order of one process, and resumed where they were."""
