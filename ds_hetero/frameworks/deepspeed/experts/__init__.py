"""Train experts that are divided among ranks beside DeepSpeed's optimizer, which does not see them."""
