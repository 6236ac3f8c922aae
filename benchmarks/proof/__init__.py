"""Check the tables that the runtime executes exhaustively in a small scope; see `benchmarks.proof.__main__`."""
