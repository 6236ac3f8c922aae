"""Benchmark of elastic jobs: kill processes and nodes by seed, and compare every step with one process."""
