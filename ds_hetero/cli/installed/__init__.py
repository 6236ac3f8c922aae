"""Commands that look at this installation, its ranks and their checkpoints."""
