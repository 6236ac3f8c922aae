"""What the measurements share: ranks, turns, contenders, statistics, the machine, and result files."""
