"""Predict whether a training fits into memory, the longest sequence that fits, and changes that help. No torch."""

from ds_hetero.planner.memory.advice import Advice, advise
from ds_hetero.planner.memory.best import Fitted, best_schedule, longest_sequence
from ds_hetero.planner.memory.breakdown import Stack, stacks
from ds_hetero.planner.memory.changes import Change
from ds_hetero.planner.memory.what_if import read_what_if

__all__ = [
    "Advice",
    "Change",
    "Fitted",
    "Stack",
    "advise",
    "best_schedule",
    "longest_sequence",
    "read_what_if",
    "stacks",
]
