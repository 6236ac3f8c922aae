"""Faults of an elastic job: ranks, agents, keepers and nodes are killed by seed, and every step is compared."""
