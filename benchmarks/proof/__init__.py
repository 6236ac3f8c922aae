"""The tables that the runtime executes, checked exhaustively in a small scope; see `benchmarks.proof.__main__`."""
