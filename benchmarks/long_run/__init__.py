"""A training of thousands of steps: the same job in one process, and on unequal ranks that fail and change."""
