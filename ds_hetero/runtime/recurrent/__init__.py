"""Layers that carry a state along the sequence, on uneven shards: linear attention, state spaces, convolutions.

scan             the state, by trading heads for tokens over the whole replica (`head_trade`)
state_passing    the state, by passing it on from shard to shard
convolution      the few tokens before a shard, from the ranks that have them
"""
