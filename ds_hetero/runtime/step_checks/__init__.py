"""Checks of a step: known quantities of a step, compared over all ranks before the optimizer.

protocol   a check: this rank's few numbers, and a verdict from the numbers of all ranks
exchange   all checks of one engine: one exchange per optimizer step
comparison_pace   when a piece of a batch is compared again
token_weights   the weight of each label in the gradient of the loss
class_loss   the loss that a model's class computes itself, beside the cross entropy of its logits
"""

from ds_hetero.runtime.step_checks.class_loss import ClassLoss
from ds_hetero.runtime.step_checks.comparison_pace import ComparisonPace
from ds_hetero.runtime.step_checks.exchange import StepChecks
from ds_hetero.runtime.step_checks.protocol import StepCheck, Undecided, Verdict
from ds_hetero.runtime.step_checks.token_weights import TokenWeights

__all__ = ["ClassLoss", "ComparisonPace", "StepCheck", "StepChecks", "TokenWeights", "Undecided", "Verdict"]
