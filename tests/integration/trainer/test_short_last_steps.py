"""The last step of an epoch of the Trainer has fewer micro-batches: gradients, losses and epochs are as on one process.

Budget: 40 s.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.combinations.modules import Module
from tests.integration.combinations.running import outcomes_by_name
from tests.integration.combinations.trainer import TrainerJob
from tests.integration.tiny import UNEVEN_2

# Of steps of two micro-batches: an epoch of 1 1/2, of 2 1/2 steps.
JOBS: dict[str, dict[str, Any]] = {
    "batch": {"batch": (3, 1), "replicas": 2, "rows": 12},
    "batch, means of micro-batches": {
        "batch": (3, 1),
        "replicas": 2,
        "rows": 20,
        "takes_items": "accepts_loss_kwargs = False",
    },
    "batch, a short last micro-batch": {"batch": (3, 1), "replicas": 2, "rows": 19},
    "batch, a loss of its own": {"batch": (3, 1), "replicas": 2, "rows": 12, "loss": "compute_loss"},
    "batch, a term by handle.mean": {"batch": (3, 1), "replicas": 2, "rows": 12, "varies": True, "loss": "term"},
    "batch, a term over micro-batches": {
        "batch": (3, 1),
        "replicas": 2,
        "rows": 12,
        "varies": True,
        "loss": "term",
        "takes_items": "accepts_loss_kwargs = False",
    },
    "shards": {"rows": 6},
    "shards, means of micro-batches": {"rows": 6, "takes_items": "accepts_loss_kwargs = False"},
    "shards, without **kwargs": {"rows": 10, "takes_items": "no **kwargs"},
    "shards, smoothing": {"rows": 6, "loss": "smoothing", "takes_items": "accepts_loss_kwargs = False"},
    "shards, a loss of its own": {"rows": 6, "loss": "compute_loss"},
    "stream": {"rows": 6, "order": "stream"},
}


@pytest.fixture(scope="module")
def outcomes() -> Any:
    return outcomes_by_name({name: job(**changes) for name, changes in JOBS.items()})


@pytest.mark.timeout(600)  # the first case waits for all jobs, which share few starts of ranks
@pytest.mark.parametrize("name", JOBS)
def test_a_short_last_step_trains_as_on_one_process(name: str, outcomes: Any) -> None:
    assert outcomes[name].kind == "exact", outcomes[name]


def job(**changes: Any) -> TrainerJob:
    plain: dict[str, Any] = {
        "world_size": 2,
        "replicas": 1,
        "schedule": (UNEVEN_2, UNEVEN_2),
        "batch": (),
        "rows": 6,
        "varies": False,
        "per_device": 2,
        "stage": 1,
        "accumulated": 2,
        "order": "sequential",
        "loss": "model",
        "takes_items": "yes",
        "module": Module("", False, False, False, 1),
        "optimizer": "sgd",
        "rates": "constant",
        "decay": 0.0,
        "clip": 1.0,
        "workers": 0,
        "drop_last": False,
        "evaluated": False,
        "evaluation": "",
        "resumed": False,
    }
    return TrainerJob(**{**plain, **changes})
