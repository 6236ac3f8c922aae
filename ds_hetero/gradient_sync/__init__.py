"""Data parallelism over replicas that cut their parameters differently. Importing this package imports no torch."""
