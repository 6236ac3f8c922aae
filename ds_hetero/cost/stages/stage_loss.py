"""The loss of a pipeline's last stage: which of a workload's settings hold for it."""

from __future__ import annotations

from dataclasses import replace

from ds_hetero.cost.workload import Workload


def loss_workload(workload: Workload) -> Workload:
    """Return the workload of the last stage's head and loss, in which Liger's kernels have no part.

    Stages sum the cross entropy of logits, in tiles if ``"tile_tokens"`` is set. They give the model no labels, and
    without labels a model that Liger has patched returns the logits of all tokens.
    """
    return replace(workload, fused_kernels=False)
