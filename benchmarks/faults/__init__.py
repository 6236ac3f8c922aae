"""Jobs of a few ranks, each with one fault planted in it; see `benchmarks.faults.__main__`."""
