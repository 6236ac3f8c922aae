"""A rank's knowledge of the ranks that it waits for: their calls, and whether they still run."""
