"""Comparison of the configuration on all ranks, with the model and the environment.

DeepSpeed reads its configuration on every rank by itself. Where one host has another file, ranks wait for each other in
different collectives, or train on by different rules. So every rank takes part here first, with a section or without,
and a difference is the same error on all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from ds_hetero.engine.differing_lines import differing_lines
from ds_hetero.engine.ds_config import enabled
from ds_hetero.engine.registered_ranks import expect_all_registered
from ds_hetero.engine.same_environment import expect_same_environment, own_environment
from ds_hetero.engine.start_name import announce_lost_restarts
from ds_hetero.errors import ConfigError
from ds_hetero.job.start import World
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.section import SECTION, expect_section_name

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
    SECTION,  # its content is compared when it has been read, by `ds_hetero.job.start`
)
"""Keys of ds_config.json, with all that is below them, which may differ between ranks."""

_MISSING = "missing"
_ON = "switched on"
_MODEL = "the model"


@waiting_for_peers("comparing the configurations of all ranks")
def agree_on_configuration(
    ds_config: Mapping[str, object] | None, model: nn.Module | None = None, error: Exception | None = None
) -> None:
    """Compare configuration, model and environment of all ranks, if any rank's configuration asks for this engine.

    Args:
        ds_config: this rank's; None where there is none, or none that could be read.
        error: why ``ds_config`` could not be read.

    Caller: every rank of the world, with a section or without.
    Collectives: one `on_all_ranks`, if there is a process group.

    Raises:
        ConfigError: on every rank, when a difference is found, naming key, ranks and values; or when a key of the
            configuration is a misspelling of the section's name.
    """

    def view() -> dict[str, str]:
        """Return the texts that ranks compare, by key."""
        if ds_config is None:
            return {SECTION: _MISSING if error is None else f"unknown, since ds_config.json cannot be read: {error}"}
        expect_section_name(ds_config)
        if not enabled(ds_config):
            state = 'switched off ("enabled": false)' if SECTION in ds_config else _MISSING
            return {SECTION: state, **dict(_leaves(ds_config))}
        content = {SECTION: _ON, **dict(_leaves(ds_config))}
        if model is not None:
            content[_MODEL] = _structure(model)
        return content

    def view_and_environment() -> tuple[dict[str, str], dict[str, str]]:
        own_view = view()
        return own_view, own_environment() if own_view[SECTION] == _ON else {}

    expect_all_registered()
    views, environments = zip(*World.current().on_all_ranks(view_and_environment), strict=True)
    if any(configuration[SECTION] == _ON for configuration in views):
        _expect_same_configuration(views)
        expect_same_environment(environments)
        announce_lost_restarts()


def _expect_same_configuration(views: Sequence[Mapping[str, str]]) -> None:
    """Refuse configurations or models that differ between ranks. Raises `ConfigError`."""
    if len({view[SECTION] for view in views}) > 1:
        keys = [SECTION]  # without a section a rank's other keys are of no interest
    else:
        keys = sorted(set().union(*views))
    labels = {key: f'"{key}"' for key in keys if key != _MODEL}
    lines = differing_lines(views, labels, absent=_MISSING)
    if lines:
        raise ConfigError("all ranks must be given the same ds_config.json, but these differ:\n" + "\n".join(lines))
    lines = differing_lines(views, {_MODEL: _MODEL}, absent=_MISSING)
    if lines:
        raise ConfigError("all ranks must build the same model, but these differ:\n" + "\n".join(lines))


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the canonical text of every value in nested objects, except keys that may differ."""
    if path in MAY_DIFFER:
        return
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, default=lambda other: f"a {type(other).__name__}")


def _structure(model: nn.Module) -> str:
    """Describe a model's parameters: how many there are, and a checksum of names, whole shapes and what is trained."""
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    shapes = []
    for name, parameter in parameters.items():
        shapes.append((name, tuple(getattr(parameter, "ds_shape", parameter.shape))))  # ds_shape: whole, on ZeRO-3
    checksum = hashlib.sha256(repr((shapes, trained)).encode()).hexdigest()[:8]
    return f"{len(shapes)} parameters, {len(trained)} of them trained, names and shapes {checksum}"
