"""Layers with a recurrent state along the sequence, on uneven shards: linear attention, state spaces, convolutions.

scan                  runs a scan over the whole sequence, by an all-to-all or by passing states
scan_call             describes one call of a scan by a layer
replica_all_to_all    all-to-all over the replica: a rank's tokens of every head <-> every token of its own heads
state_passing         passes states from shard to shard
convolution           short causal convolution; fetches the few tokens before a shard from the ranks that have them
sequences             the sequences of a batch through which a state runs, and their pieces on a rank
"""
