"""What a rank knows of the other ranks when it waits for them: what they have called, and whether they still run."""
