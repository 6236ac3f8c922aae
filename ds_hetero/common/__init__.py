"""Shared by every part of ds_hetero: array types, units, text for people, reading of files, what is installed."""
