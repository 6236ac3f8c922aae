"""ds_config.json: the one reader of it, as values, and how all ranks agree on it before anything is built from it.

DeepSpeed's own reader of batch sizes is `installer`, since it writes them back. Imports no framework.

A rank that never registered runs stock DeepSpeed: it takes part in nothing of ours, and the others would wait for it in
their first collective without a word. So each registered rank says in the process group's store that it is here, and
waits for the others there, where it can see who is missing.

DeepSpeed reads its configuration on every rank by itself. Where one host has another file, ranks wait for each other in
different collectives, or train on by different rules. So every rank takes part here first, with a section or without,
and a difference is the same error on all of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ds_hetero.common.reading import is_weight
from ds_hetero.cost.workload import Buffers
from ds_hetero.decision.decide import expect_planners
from ds_hetero.decision.facts import TrainingFacts
from ds_hetero.engine.process import announce_lost_restarts
from ds_hetero.errors import ConfigError, PeerError
from ds_hetero.job.capabilities import differing_lines, expect_same_environment, own_environment
from ds_hetero.job.start import World
from ds_hetero.runtime.collectives import timeout_of_job
from ds_hetero.runtime.peers.calls import ranks_text
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.section import SECTION, HeterogeneitySection, expect_section_name, read_section

DsConfig = Mapping[str, Any]
"""Content of ds_config.json."""

_FP32 = ("fp32", "float32")


def enabled(ds_config: DsConfig | None) -> bool:
    """Whether a DeepSpeed configuration asks for this engine. Looks no further: checking is for all ranks together."""
    if ds_config is None or SECTION not in ds_config:
        return False
    return not isinstance(_value(ds_config, SECTION), Mapping) or _value(ds_config, SECTION, "enabled") is not False


def says_batches(ds_config: DsConfig | None) -> bool:
    """Whether a DeepSpeed configuration asks for this engine, with the batch of every rank."""
    return enabled(ds_config) and _value(ds_config, SECTION, "batch") is not None


def section_of(ds_config: DsConfig) -> HeterogeneitySection | None:
    """Read the "heterogeneity" section; None where there is none or it is switched off.

    Raises:
        ConfigError: see `read_section`, `ds_hetero.values.section.expect_section_name` and `expect_planners`.
    """
    expect_section_name(ds_config)
    section = read_section(ds_config[SECTION]) if SECTION in ds_config else None
    if section is not None:
        expect_planners(section)
    return section


def read_training_facts(ds_config: DsConfig) -> TrainingFacts:
    """Read everything that this engine needs to know of a DeepSpeed configuration."""
    bf16, former_bf16, fp16 = (_value(ds_config, name, "enabled") is True for name in ("bf16", "bfloat16", "fp16"))
    return TrainingFacts(
        zero_stage=_number(ds_config, "zero_optimization", "stage") or 0,
        train_batch_size=_number(ds_config, "train_batch_size"),
        micro_batch_size=_number(ds_config, "train_micro_batch_size_per_gpu"),
        accumulation_steps=_number(ds_config, "gradient_accumulation_steps"),
        mixed_precision="bfloat16" if bf16 or former_bf16 else "float16" if fp16 else None,
        accumulates_in_fp32=_value(ds_config, "data_types", "grad_accum_dtype") in _FP32,
        offloads_optimizer=_offloads(ds_config, "offload_optimizer"),
        offloads_parameters=_offloads(ds_config, "offload_param"),
        sp_size=_value(ds_config, "sequence_parallel_size"),
        optimizer=str(_value(ds_config, "optimizer", "type") or ""),
        buffers=_buffers(ds_config),
    )


def _buffers(ds_config: DsConfig) -> Buffers:
    """Sizes in elements, also where they are written as 5e8; DeepSpeed's default for anything else, such as "auto"."""
    keys = {
        "reduce_bucket": "reduce_bucket_size",
        "prefetch_bucket": "stage3_prefetch_bucket_size",
        "live_parameters": "stage3_max_live_parameters",
        "sub_group": "sub_group_size",
    }
    values = {name: _value(ds_config, "zero_optimization", key) for name, key in keys.items()}
    return Buffers(**{name: int(value) for name, value in values.items() if is_weight(value)})


def _value(ds_config: Any, *path: str) -> Any:
    """The value at a path of nested objects; None where a part of it is missing."""
    value = ds_config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(ds_config: DsConfig, *path: str) -> int | None:
    """The whole number at a path; None for anything else, such as "auto"."""
    value = _value(ds_config, *path)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _offloads(ds_config: DsConfig, key: str) -> bool:
    device = _value(ds_config, "zero_optimization", key, "device")
    return device not in (None, "none")


def size_of_configuration(ds_config: DsConfig | None) -> int | None:
    """Ranks that share a batch: ``sequence_parallel_size``, the ranks of an inline schedule, or all of the job.

    Where replicas take different batches, or are cut into stages, they are one worker on all ranks.

    Returns:
        None without the section, with batches by rank in it, with one rank, or with what is no size and will be
        refused later.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if ds_config is None or not enabled(ds_config) or says_batches(ds_config) or world_size == 1:
        return None
    size: object = read_training_facts(ds_config).sp_size
    section = ds_config[SECTION]
    schedule = section.get("schedule") if isinstance(section, Mapping) else None
    if size is None and isinstance(schedule, Mapping) and isinstance(schedule.get("groups"), list):
        size = sum(len(group["ranks"]) for group in schedule["groups"] if isinstance(group, Mapping))
    size = world_size if size is None else size
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 1 and world_size % size == 0
    return size if is_size else None  # type: ignore[return-value]


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

logger = logging.getLogger(__name__)

_PREFIX = "ds_hetero/registered"
_WARN_AFTER_S = 60.0  # other ranks may be reading a large model
_POLL_S = 0.05
_LINGER_S = 1.0

_calls = 0

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
    keys = [SECTION] if len({view[SECTION] for view in views}) > 1 else sorted({key for view in views for key in view})
    if lines := differing_lines(views, {key: f'"{key}"' for key in keys if key != _MODEL}, absent=_MISSING):
        raise ConfigError("all ranks must be given the same ds_config.json, but these differ:\n" + "\n".join(lines))
    if lines := differing_lines(views, {_MODEL: _MODEL}, absent=_MISSING):
        raise ConfigError("all ranks must build the same model, but these differ:\n" + "\n".join(lines))


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
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


def expect_all_registered(
    warn_after_s: float = _WARN_AFTER_S,
    give_up_after_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until every rank of the world is here; those that never registered are named.

    Args:
        warn_after_s: seconds until a warning says who is missing.
        give_up_after_s: seconds until that is an error; left out, the timeout of the default process group.

    Caller: every registered rank, as often as the others; nothing happens without a process group.
    Collectives: none; one key of the store per rank and call.

    Raises:
        ConfigError: ranks are missing.
        PeerError: the store cannot be reached any more.
    """
    global _calls
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _calls += 1
    if give_up_after_s is None:
        give_up_after_s = timeout_of_job().total_seconds()
    start, has_warned = time.monotonic(), False
    while missing := _missing_ranks(_calls):
        waited_s = time.monotonic() - start
        if waited_s > give_up_after_s:
            if dist.get_rank() == 0:
                sleep(_LINGER_S)  # it may keep the store, which the others ask until they give up, too
            raise ConfigError(_missing_text(missing, waited_s))
        if waited_s > warn_after_s and not has_warned:
            logger.warning("%s", _missing_text(missing, waited_s))
            has_warned = True
        sleep(_POLL_S)


def _missing_ranks(call: int) -> list[int]:
    """The ranks that have not come to this call yet; this one says that it has."""
    try:
        store = PrefixStore(f"{_PREFIX}/{call}", _get_default_store())
        store.set(str(dist.get_rank()), "here")
        return [rank for rank in range(dist.get_world_size()) if not store.check([str(rank)])]
    except RuntimeError as error:
        raise PeerError(
            "rank 0 or the launcher, whichever keeps the store of the job, could not be reached any more while this "
            "rank waited for all to come to deepspeed.initialize."
        ) from error


def _missing_text(missing: list[int], waited_s: float) -> str:
    return (
        f"{ranks_text(missing)} did not reach deepspeed.initialize with ds_hetero registered within {waited_s:.0f} s "
        "of this rank. Call ds_hetero.register() on every rank of all nodes: a rank without it runs stock DeepSpeed "
        "and never joins. (One that is still reading its model comes later; one that has ended never does.)"
    )
