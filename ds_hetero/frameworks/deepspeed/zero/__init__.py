"""ZeRO with partitions in proportion to weights: DeepSpeed's optimizers of stages 1 to 3, and their checkpoints."""
