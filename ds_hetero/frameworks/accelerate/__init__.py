"""Adapter of accelerate: it counts replicas instead of ranks."""
