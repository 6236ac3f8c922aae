"""Pipelines of unequal stages: sends between stages that shard activations differently, and the order of the passes."""
