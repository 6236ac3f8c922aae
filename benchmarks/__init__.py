"""Measurements behind docs/measured.md; each module is a command: ``python -m benchmarks.versus_stock``."""
