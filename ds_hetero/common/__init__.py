"""Helpers that every part of ds_hetero uses: array types, units, texts, files, checks of installed packages."""
