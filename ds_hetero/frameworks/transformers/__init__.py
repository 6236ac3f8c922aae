"""Adapter of transformers: its models, their attention, and the Trainer."""
