"""Every table and figure of the five papers as a table of ours beside the published one; one module for each paper."""
