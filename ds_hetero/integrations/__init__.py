"""Where ds_hetero meets DeepSpeed, transformers and accelerate: one file for the private names of each."""
