"""The search for pipelines: exact cuts and batches, starts, moves, compositions as a programme, the exact optimum."""
