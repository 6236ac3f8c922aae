"""Which job a number of a seed is; the same one on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.integration.combinations import accelerated, families, loops, pipelines, trainer, unequal
from tests.integration.combinations.running import Job

# By kind: how often it is drawn, and by what.
KINDS: dict[str, tuple[float, Callable[[random.Random], Any]]] = {
    "loop": (4, loops.draw),
    "family": (2, families.draw),
    "trainer": (2, trainer.draw),
    "unequal": (1.5, unequal.draw),
    "pipelines": (1.5, pipelines.draw),
    "accelerate": (1.5, accelerated.draw),
}


def drawn(seed: int, number: int) -> Job:
    """One of all jobs."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    job: Job = KINDS[kind][1](rng)
    return job
