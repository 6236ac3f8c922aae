"""Attention over a replica: the exchange of heads, the ring of groups, and the kernels on each rank."""
