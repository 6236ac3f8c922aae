"""A job that outlives its ranks: state in shared memory, copies on other nodes, and a rendezvous that meets again."""
