"""Costs of documents on the units of a schedule, and the time of a batch that is placed."""
