"""Measurements behind the claims in README.md; each module is a command: ``python -m benchmarks.versus_stock``."""
