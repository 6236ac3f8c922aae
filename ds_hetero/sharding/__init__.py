"""Arithmetic of unequal shards: of weighted ZeRO, and of gradients of replicas with unlike cuts. No torch."""
