"""The sections of the run, one module each, in the order in which they run."""
