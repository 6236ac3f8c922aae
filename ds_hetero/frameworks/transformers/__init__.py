"""Transformers' private names, and nothing else: models, their attention, the Trainer."""
