"""The search for a schedule: partitions, shares, ring orders, descent, and the exact reference."""
