"""Feed mutated inputs to the readers and to the command line; see `benchmarks.fuzz.__main__`."""
