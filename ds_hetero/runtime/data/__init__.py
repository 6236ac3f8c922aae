"""Loaders: batches of one process are read, and cut into the shards of each rank."""
