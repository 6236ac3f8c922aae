"""Compare configuration, model and environment between all ranks, before the first collective depends on them.

DeepSpeed reads the configuration on each rank separately. If a host has another file, ranks wait for each other in
different collectives, or train by different rules. So all ranks compare their configurations first, also those without
a section, and a difference is the same error on all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from ds_hetero.engine.differing_lines import differing_lines
from ds_hetero.engine.ds_config import has_active_section
from ds_hetero.engine.registered_ranks import expect_all_registered
from ds_hetero.engine.same_environment import announce_hidden_waits, expect_same_environment, own_environment
from ds_hetero.engine.start_name import announce_lost_restarts
from ds_hetero.errors import ConfigError
from ds_hetero.job.start import World
from ds_hetero.runtime.experts.parts import WHOLE_SHAPE
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.section import SECTION, expect_section_name

MAY_DIFFER = (
    "aio",  # depends on the host's disks
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "tensorboard",  # this and the next four: only rank 0 writes them
    "wandb",
    "comet",
    "csv_monitor",
    "flops_profiler.output_file",
    "dump_state",  # printing
    "steps_per_print",
    SECTION,  # `ds_hetero.job.start` compares its content after reading it
)
"""Keys of ds_config.json that may differ between ranks, with all keys below them."""

_MISSING = "missing"
_ON = "switched on"
_MODEL = "the model"


@waiting_for_peers("comparing the configurations of all ranks")
def agree_on_configuration(
    ds_config: Mapping[str, object] | None, model: nn.Module | None = None, error: Exception | None = None
) -> None:
    """Compare configuration, model and environment of all ranks, if the configuration of any rank has a section.

    Args:
        ds_config: this rank's configuration; None if there is none, or it could not be read.
        model: this rank's model, if it is known.
        error: why the configuration could not be read.

    Caller: every rank of the world, with a section or without.
    Collectives: one `on_all_ranks`, if there is a process group.

    Raises:
        ConfigError: on every rank: there is a difference, of which the message has key, ranks and values; or a key of
            the configuration is a misspelling of the section's name.
    """

    def view() -> dict[str, str]:
        """Return the texts that ranks compare, by key."""
        if ds_config is None:
            return {SECTION: _MISSING if error is None else f"unknown, since ds_config.json cannot be read: {error}"}
        expect_section_name(ds_config)
        if not has_active_section(ds_config):
            state = 'switched off ("enabled": false)' if SECTION in ds_config else _MISSING
            return {SECTION: state, **dict(_leaves(ds_config))}
        content = {SECTION: _ON, **dict(_leaves(ds_config))}
        if model is not None:
            content[_MODEL] = _structure(model)
        return content

    def view_and_environment() -> tuple[dict[str, str], dict[str, str]]:
        local_view = view()
        return local_view, own_environment() if local_view[SECTION] == _ON else {}

    expect_all_registered()
    views, environments = zip(*World.current().on_all_ranks(view_and_environment), strict=True)
    if any(configuration[SECTION] == _ON for configuration in views):
        _expect_same_configuration(views)
        expect_same_environment(environments)
        announce_hidden_waits()
        announce_lost_restarts()


def _expect_same_configuration(views: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have the same configuration and model. Raises `ConfigError`: they differ.

    Args:
        views: the texts to compare of every rank, by key.
    """
    if len({view[SECTION] for view in views}) > 1:
        keys = [SECTION]  # if some ranks have no section, their other keys do not matter
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
    """Yield the path and the JSON text of every value in nested objects, except below keys that may differ."""
    if path in MAY_DIFFER:
        return
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, default=lambda other: f"a {type(other).__name__}")


def _structure(model: nn.Module) -> str:
    """Describe a model's parameters by their number and a checksum of names, shapes and which of them are trained."""
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    shapes = []
    for name, parameter in parameters.items():
        on_zero_3 = getattr(parameter, "ds_shape", parameter.shape)  # the whole shape of a partitioned parameter
        shapes.append((name, tuple(getattr(parameter, WHOLE_SHAPE, on_zero_3))))
    checksum = hashlib.sha256(repr((shapes, trained)).encode()).hexdigest()[:8]
    return f"{len(shapes)} parameters, {len(trained)} of them trained, names and shapes {checksum}"
