"""Results of the planner: a plan, its prediction, and how it compares with what was not chosen."""
