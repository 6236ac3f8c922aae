"""Shared code of the measurements: ranks, turns, contenders, statistics, the machine, and result files."""
