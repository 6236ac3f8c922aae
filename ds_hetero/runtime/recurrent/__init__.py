"""Layers that carry a state along the sequence, on uneven shards: linear attention, state spaces, convolutions.

``scan``         the state: by trading heads for tokens over the whole replica, or by passing states on
``convolution``  the few tokens before a shard, from whoever holds them
"""
