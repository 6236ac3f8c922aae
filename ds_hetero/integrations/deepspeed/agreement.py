"""All ranks agree on ds_config.json and on the model before anything is built from them.

DeepSpeed reads its configuration on every rank by itself. Where one host has another file, ranks wait for each other in
different collectives, or train on by different rules. So every rank takes part here first, with a section or without,
and a difference is the same error on all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ds_hetero.config import SECTION, expect_section_name
from ds_hetero.errors import ConfigError
from ds_hetero.integrations.deepspeed.facts import enabled
from ds_hetero.job.start import World

__all__ = ["MAY_DIFFER", "agree_on_configuration"]

MAY_DIFFER = (
    "aio",  # how fast a host's disks are
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "tensorboard",  # rank 0 alone writes these
    "wandb",
    "comet",
    "csv_monitor",
    "flops_profiler.output_file",
    "dump_state",  # printing
    "steps_per_print",
    SECTION,  # its content is compared when it has been read, by `ds_hetero.job.start.agree_on_facts`
)
"""Keys of ds_config.json, with all that is below them, which may differ between ranks."""

_MOST_SHOWN = 5  # differing keys in one message
_LONGEST_SHOWN = 60  # characters of a value in a message
_MISSING = "missing"
_ON = "switched on"
_MODEL = "the model"


def agree_on_configuration(
    ds_config: Mapping[str, Any] | None, model: nn.Module | None = None, error: Exception | None = None
) -> None:
    """Compare ds_config.json and the model of all ranks, if any rank's configuration asks for this engine.

    Args:
        ds_config: this rank's; None where there is none, or none that could be read.
        model: to be trained with it, if there is one yet.
        error: why ``ds_config`` could not be read.

    Caller: every rank of the world, with a section or without.
    Collectives: one `on_all_ranks`, if there is a process group.

    Raises:
        ConfigError: on every rank, when a difference is found, naming key, ranks and values; or when a key of the
            configuration is a misspelling of the section's name.
    """

    def view() -> dict[str, str]:
        if ds_config is None:
            return {SECTION: _MISSING if error is None else f"unknown, since ds_config.json cannot be read: {error}"}
        expect_section_name(ds_config)
        if not enabled(ds_config):
            state = 'switched off ("enabled": false)' if SECTION in ds_config else _MISSING
            return {SECTION: state, **dict(_leaves(ds_config))}
        return {SECTION: _ON, **dict(_leaves(ds_config)), **({} if model is None else {_MODEL: _structure(model)})}

    views = World.current().on_all_ranks(view)
    if any(rank[SECTION] == _ON for rank in views):
        _expect_equal(views)


def _expect_equal(views: list[dict[str, str]]) -> None:
    keys = [SECTION] if len({view[SECTION] for view in views}) > 1 else sorted({key for view in views for key in view})
    differing = [key for key in keys if len({view.get(key, _MISSING) for view in views}) > 1]
    if not differing:
        return
    lines = [f"  {_quoted(key)}: {_by_rank([view.get(key, _MISSING) for view in views])}" for key in differing]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} more"]
    what = "build the same model" if differing == [_MODEL] else "be given the same ds_config.json"
    raise ConfigError(f"all ranks must {what}, but these differ:\n" + "\n".join(lines))


def _quoted(key: str) -> str:
    return key if key == _MODEL else f'"{key}"'


def _by_rank(values: list[str]) -> str:
    """``1.0 on rank 0, 2; missing on rank 1``: every value with its ranks."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"{_short(value)} on rank {', '.join(held_by)}" for value, held_by in ranks.items())


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_SHOWN else value[: _LONGEST_SHOWN - 3] + "..."


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and canonical text of every value in nested objects, except what may differ."""
    if path in MAY_DIFFER:
        return
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, default=lambda other: f"a {type(other).__name__}")


def _structure(model: nn.Module) -> str:
    """The parameters' names and whole shapes, in short: how many there are, and a checksum."""
    shapes = [(name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in model.named_parameters()]
    checksum = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    return f"{len(shapes)} parameters, names and shapes {checksum}"
