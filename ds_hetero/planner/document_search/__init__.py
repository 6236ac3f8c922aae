"""The search for a placement of a batch's documents."""
