"""The state of a rank in memory: what is taken, when it counts, and how a new world finds it."""
