"""Every table and figure of the five papers as a table of ours beside theirs, one module for each paper."""
