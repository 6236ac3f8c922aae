"""Memory of one rank: model states under ZeRO, activations, attention and exchange buffers, logits.

Dimension key: D ranks, K groups.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds_hetero.cost.types import Workload
from ds_hetero.models import ModelSpec

__all__ = ["static_bytes"]

Floats = npt.NDArray[np.float64]


def static_bytes(model: ModelSpec, workload: Workload, num_ranks: int) -> Floats:
    """Parameters, gradients and optimizer state that every rank keeps, ``[D]``.

    ZeRO (arXiv:1910.02054, section 3): stage 1 partitions the optimizer state, stage 2 the gradients too, stage 3 the
    parameters too, each over all ranks of all replicas. ``zero_weights`` are the shares of one replica's ranks;
    left out, all are equal.
    """
    weights_D = np.ones(num_ranks) if workload.zero_weights is None else np.array(workload.zero_weights)
    share_D = weights_D / weights_D.sum() / workload.data_parallel
    stage, count = workload.zero_stage, model.num_parameters
    return np.asarray(
        workload.optimizer_bytes * count * (share_D if stage >= 1 else 1.0)
        + workload.gradient_bytes * count * (share_D if stage >= 2 else 1.0)
        + workload.element_bytes * count * (share_D if stage >= 3 else 1.0)
    )
