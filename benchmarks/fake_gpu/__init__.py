"""Run whole training steps at real size on GPUs that do not exist; see `__main__`."""
