"""ZeRO on unequal ranks, the arithmetic: who owns which elements, and which shares fit the ranks' memory.

Imports no torch. What partitions the tensors of a training by it is in `ds_hetero.integrations.deepspeed.zero`.
"""
