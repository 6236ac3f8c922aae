"""Files of checkpoints: complete or not there, and checked."""
