"""Mutated inputs, through the readers and through the command line; see `benchmarks.fuzz.__main__`."""
