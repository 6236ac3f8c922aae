"""Effect of every key of the "heterogeneity" section on pipeline stages, by how the ranks of a stage share its work.

The refusal at the start of a job, the search and the table in docs/pipeline-details.md read this list, and a test
checks the cost model of stages against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SectionKey:
    """Effect of one key on pipeline stages: refused, without effect in some kinds of stages, or else followed.

    Args:
        idle: reason why the key has no effect, by kind of stage (``one``, ``tensor``, ``sequence``); rank 0 logs it.
    """

    refused: str = ""  # reason why pipelines refuse the key; empty if they do not
    idle: Mapping[str, str] = field(default_factory=dict)
    off: tuple[Any, ...] = ()  # values of the key that ask for nothing, and so are not refused


def _refused(why: str, *off: Any) -> SectionKey:
    """Return the effect of a key that pipelines refuse for the reason ``why``, unless its value is one of ``off``."""
    return SectionKey(refused=why, off=off)


_FOLLOWED = SectionKey()

SECTION_KEYS: Mapping[str, SectionKey] = {
    "enabled": _FOLLOWED,
    "cluster": _FOLLOWED,
    "schedule": _FOLLOWED,
    "planner": _FOLLOWED,
    "parallel": _FOLLOWED,
    "seq_len": _FOLLOWED,
    "tile_tokens": _FOLLOWED,
    "keep_attention": _refused("stages compute attention again, and their memory is counted for that", False),
    "attention": SectionKey(
        idle=dict.fromkeys(("one", "tensor"), "such stages compute the attention that the model was built with"),
        off=(None,),
    ),
    "ring_gradients": SectionKey(
        idle=dict.fromkeys(("one", "tensor"), "such stages send no keys and values"),
        off=("fp32",),
    ),
    "replan.enabled": _FOLLOWED,
    "replan.report_only": _FOLLOWED,
    "token_unit": _refused("the search for pipelines shares single tokens in a stage", None),
    "layout": _refused("the schedules of the plan give the layout", None),
    "batch": _refused("the plan gives the batches of every pipeline", None),
    "elastic": _FOLLOWED,
    "placement.mode": _refused("pipelines split batches by length", None, "stream"),
    "loss": _refused("pipelines compute the loss of the model themselves", None),
    "zero_within": _refused("the plan says which ranks own optimizer state", None),
    "experts": _refused("stages hold the experts of their layers, or cut every one of them", None),
    "zero_partition": _refused('optimizer state follows "zero.owner_weights" of the plan', "uniform"),
    "checks.enabled": _FOLLOWED,
    "checks.compare_every": _refused(
        "no rank holds the whole model, to compare stages with", "by_cost", "first_batch", "off"
    ),
    "verify": _refused("no rank holds the whole model, to compare stages with", None, "off"),
    "evaluation": _refused("pipelines always evaluate stage by stage", None, "sharded"),
    "report": _FOLLOWED,
}
