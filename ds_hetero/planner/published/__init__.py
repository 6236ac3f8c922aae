"""Planners as their papers describe them; every module has a `PublishedPlanner`, listed in `registry`. No torch."""
