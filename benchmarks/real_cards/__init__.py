"""Compare predictions of the planning half with public measurements of real GPUs: no GPU, no torch."""
