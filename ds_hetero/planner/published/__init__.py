"""Planners as papers describe them, each a module with a `PublishedPlanner`, all in `registry`. No torch."""
