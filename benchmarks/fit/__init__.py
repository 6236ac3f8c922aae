"""Compare the estimate of `ds-hetero fit` with measured peaks of memory, and its advice with a real limit."""
