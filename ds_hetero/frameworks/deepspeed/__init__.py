"""DeepSpeed's private names, and nothing else: its engine, its ZeRO optimizers, its checkpoints."""
