"""Search over jobs: kinds of parallelism, ZeRO stages, ways to save memory, micro-batches, and who takes part."""
