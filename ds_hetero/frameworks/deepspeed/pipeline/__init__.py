"""Pipelines of unequal stages behind DeepSpeed's engine, so that a script's loop stays the same."""
