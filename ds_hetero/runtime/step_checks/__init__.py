"""Checks of every optimizer step: the ranks compare a few numbers of the step before the optimizer uses its gradients.

protocol                 interface of a check: this rank's numbers, and a verdict from the numbers of all ranks
exchange                 runs all checks of one engine with one exchange per optimizer step
as_loaded                the model gets the positions and labels that the loader made
same_switches            the same parameters are trained, in the same mode, on every rank
same_values              parameters, buffers and averaged gradients are the same on every rank
stage_buffers            forwards of a pipeline's stage do not change its buffers
token_weights            all labels have one weight in the gradient of the loss; with token_weight_records and _rules
token_factors            the sums over tokens in the loss have the same factor on every rank
local_weights            weights of tokens in the loss are not computed from a rank's part of the sequences alone
class_loss               a model's class does not compute another loss than the cross entropy of its logits
comparison_pace          number of steps after which a piece of a batch is compared with one process again
early_comparisons        comparisons that come sooner, because a gradient was exactly zero
graph_changes            losses have new operations, so a piece of a batch is compared again
"""

from ds_hetero.runtime.step_checks.as_loaded import AsLoaded
from ds_hetero.runtime.step_checks.class_loss import ClassLoss
from ds_hetero.runtime.step_checks.comparison_pace import ComparisonPace
from ds_hetero.runtime.step_checks.exchange import StepChecks
from ds_hetero.runtime.step_checks.graph_changes import GraphChanges
from ds_hetero.runtime.step_checks.local_weights import LocalWeights
from ds_hetero.runtime.step_checks.protocol import StepCheck, Undecided, Verdict
from ds_hetero.runtime.step_checks.same_switches import SameSwitches
from ds_hetero.runtime.step_checks.same_values import (
    RTOL,
    RTOL_HALF_UPDATES,
    same_gradients,
    same_parameters,
    same_untrained,
)
from ds_hetero.runtime.step_checks.stage_buffers import StageBuffers
from ds_hetero.runtime.step_checks.token_factors import TokenFactors
from ds_hetero.runtime.step_checks.token_weights import TokenWeights

__all__ = [
    "RTOL",
    "RTOL_HALF_UPDATES",
    "AsLoaded",
    "ClassLoss",
    "ComparisonPace",
    "GraphChanges",
    "LocalWeights",
    "SameSwitches",
    "StageBuffers",
    "StepCheck",
    "StepChecks",
    "TokenFactors",
    "TokenWeights",
    "Undecided",
    "Verdict",
    "same_gradients",
    "same_parameters",
    "same_untrained",
]
