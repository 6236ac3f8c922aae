"""Pipelines of unequal stages behind an engine of DeepSpeed's: the loop of the user does not change."""
