"""Profiler of live ranks: measures their devices and links, and caches the profiles."""
