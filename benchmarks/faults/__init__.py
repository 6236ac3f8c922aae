"""Run jobs of a few ranks with one fault planted in each; see `benchmarks.faults.__main__`."""
