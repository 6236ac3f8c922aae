"""The searches: which schedule is best for this cluster, model and length, and why."""
