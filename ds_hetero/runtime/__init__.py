"""Runtime: executes a schedule, whether the planner, a rule or the user has made it."""
