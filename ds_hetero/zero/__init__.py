"""ZeRO on unequal ranks: optimizer state, gradients and parameters owned in proportion to weights.

`layout` is arithmetic that plans without torch; the rest subclasses DeepSpeed's optimizers. Importing this package
imports neither.
"""
