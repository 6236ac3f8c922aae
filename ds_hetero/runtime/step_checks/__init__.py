"""Checks of a step: known quantities of a step, compared over all ranks before the optimizer.

protocol   a check: this rank's few numbers, and a verdict from the numbers of all ranks
exchange   all checks of one engine: one exchange per optimizer step
"""

from ds_hetero.runtime.step_checks.exchange import StepChecks
from ds_hetero.runtime.step_checks.protocol import StepCheck, Undecided, Verdict

__all__ = ["StepCheck", "StepChecks", "Undecided", "Verdict"]
