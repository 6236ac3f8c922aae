"""Batches of many documents: what placing them by their documents brings."""
