"""Checks of a step: known quantities of a step, compared over all ranks before the optimizer.

protocol   a check: this rank's few numbers, and a verdict from the numbers of all ranks
exchange   all checks of one engine: one exchange per optimizer step
comparison_pace   after how many steps a piece of a batch is compared again
early_comparisons   comparisons that come sooner while gradients are exactly zero
graph_changes   whether a piece of a batch has to be compared since losses are made of other operations
as_loaded   places and labels that a forward is given are those of the loader
same_switches   what of the model is trained and how it runs is the same on every rank
same_values   parameters, buffers and averaged gradients are the same on every rank
stage_buffers   forwards of a stage of a pipeline leave its buffers as they are
token_weights   the weight of each label in the gradient of the loss
token_factors   the factor of each rank's sums over tokens in the loss
local_weights   the numbers by which tokens are multiplied in the loss are not made of a rank's part alone
class_loss   the loss that a model's class computes itself, beside the cross entropy of its logits
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
