"""Calls of a script, for each kind of model: its loader, its loss, its forward on shards."""
