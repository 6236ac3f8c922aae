"""Emulate a cluster on one Linux machine: unequal speeds, memory and links of ranks, made, verified and removed."""
