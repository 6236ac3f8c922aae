"""The processes of an elastic job on one node: launcher, node server, agents and fork server."""
