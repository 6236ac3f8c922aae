"""Benchmarks of batches of many documents: the gain of placing them by documents."""
