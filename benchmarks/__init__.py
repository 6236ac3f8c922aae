"""Measurements behind docs/evidence; each module is a command: ``python -m benchmarks.versus_stock``."""
