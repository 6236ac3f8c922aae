"""The estimate of `ds-hetero fit` against measured peaks of memory, and its advice against a real limit."""
