"""Inputs of commands: options, a cluster, a model and a workload, schedules, plans, lengths of documents."""
