"""Arithmetic of unequal shards: weighted ZeRO, and gradients of replicas that cut parameters differently. No torch."""
