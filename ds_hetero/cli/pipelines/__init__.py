"""Commands for pipelines of unequal stages: plan, compare, simulate, show, replan."""
