"""The search for pipelines: exact cuts and batches, starts, moves, the programme over compositions, the exact reference."""
