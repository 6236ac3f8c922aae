"""The processes of an elastic job on one node: launcher, keeper, agents, warm server."""
