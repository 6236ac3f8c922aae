"""accelerate's private names, and nothing else."""
