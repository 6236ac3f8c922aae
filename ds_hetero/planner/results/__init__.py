"""Results of the planner: a plan, its prediction, and a comparison with the candidates that were not chosen."""
