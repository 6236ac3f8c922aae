"""Measures live ranks and the links between them, and keeps what it measured."""
