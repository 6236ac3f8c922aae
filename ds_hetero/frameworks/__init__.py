"""Where ds_hetero meets DeepSpeed, transformers, accelerate and TRL; `PRIVATE_NAMES` lists what a file replaces."""
