"""Pipelines of unequal stages: activations between stages that cut them differently, and the order of the passes."""
