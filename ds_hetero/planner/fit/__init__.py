"""Does a training fit into memory, up to which length, and what would make it fit? Imports no torch."""

from ds_hetero.planner.fit.advice import Advice, Change, advise
from ds_hetero.planner.fit.best import Fitted, best_schedule, longest_sequence
from ds_hetero.planner.fit.stack import Stack, stacks
from ds_hetero.planner.fit.what_if import WhatIf, read_what_if

__all__ = [
    "Advice",
    "Change",
    "Fitted",
    "Stack",
    "WhatIf",
    "advise",
    "best_schedule",
    "longest_sequence",
    "read_what_if",
    "stacks",
]
