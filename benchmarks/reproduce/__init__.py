"""Rebuild published tables and figures; one module per paper, each a command."""
