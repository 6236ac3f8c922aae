"""The search for pipelines: exact cuts and batches, starts, moves, a bound, the exact optimum of small clusters."""
