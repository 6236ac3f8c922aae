"""What the planner hands out: a plan, its prediction, and how it compares with what was not chosen."""
