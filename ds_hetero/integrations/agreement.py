"""What all ranks must agree on before training: the section, the model, and the schedules that follow from them.

A rank that finds a fault tells all others before anybody acts, so that every rank stops with the same message and none
waits for ever. Only rank 0 reads the schedule and cluster files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_hetero import __version__, errors
from ds_hetero.config import SECTION, HeterogeneitySection, needs_measuring, read_section, resolve
from ds_hetero.errors import ConfigError, HeteroError, PeerError
from ds_hetero.integrations.model_checks import check_model, head_counts, pretrained_of
from ds_hetero.runtime.exchange import all_gather_bytes
from ds_hetero.schedule import Schedule

__all__ = ["agree_on_schedules"]


def agree_on_schedules(
    model: nn.Module, ds_config: Mapping[str, Any], sp_sizes: Mapping[str, int | None]
) -> tuple[HeterogeneitySection, tuple[Schedule, ...]]:
    """Check the section and the model on every rank, resolve the schedules on rank 0, and hand them to all.

    Args:
        model: the model to be split.
        ds_config: the DeepSpeed configuration, with the section.
        sp_sizes: see `ds_hetero.config.sp_size_of`.

    Caller: every rank of the world, once per model.
    Collectives: two rounds of `all_gather_bytes`; between them, where the live ranks are to be measured, those of
        `ds_hetero.cluster.profile.measure_cached`.

    Raises:
        HeteroError: the same one on every rank.
        PeerError: another rank failed in a way that is no rule of ds_hetero's.
    """

    def examine() -> dict[str, Any]:
        section = read_section(ds_config)
        assert section is not None
        check_model(model)
        num_heads, num_kv_heads = head_counts(pretrained_of(model))
        return {
            SECTION: section.model_dump(),
            "model": type(pretrained_of(model)).__name__,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "sequence-parallel size": dict(sp_sizes),
            "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")}
            | {"ds_hetero": __version__},
        }

    facts = _agreed(examine)
    _expect_equal(facts)
    section = HeterogeneitySection.model_validate(facts[0][SECTION])
    measured = None
    if needs_measuring(section):
        from ds_hetero.integrations.profiling import profile_cached

        measured, _ = profile_cached()

    def plan() -> list[Any]:
        if dist.get_rank() > 0:
            return []
        schedules = resolve(
            section,
            num_heads=facts[0]["num_heads"],
            num_kv_heads=facts[0]["num_kv_heads"],
            world_size=dist.get_world_size(),
            sp_sizes=sp_sizes,
            measured=measured,
        )
        return [schedule.to_dict() for schedule in schedules]

    return section, tuple(Schedule.from_dict(data) for data in _agreed(plan)[0])


def _agreed(compute: Callable[[], Any]) -> list[Any]:
    """What ``compute`` returned on every rank, as JSON; or, on every rank, the first error of any."""
    mine: Exception | None = None
    try:
        told: dict[str, Any] = {"result": compute()}
    except Exception as error:
        mine = error
        told = {"error": type(error).__name__, "message": str(error)}
    device = torch.device("cpu") if "gloo" in dist.get_backend() else torch.device("cuda", torch.cuda.current_device())
    _, payloads = all_gather_bytes([], json.dumps(told).encode(), None, device)
    heard = [json.loads(payload) for payload in payloads]
    failed = {rank: outcome for rank, outcome in enumerate(heard) if "error" in outcome}
    if failed:
        raise _error_of_all(failed, len(heard)) from mine
    return [outcome["result"] for outcome in heard]


def _error_of_all(failed: Mapping[int, Mapping[str, str]], world_size: int) -> Exception:
    """One error for every rank; ranks that say the same are named together."""
    ranks_by_message: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in failed.items():
        ranks_by_message.setdefault((outcome["error"], outcome["message"]), []).append(rank)
    (name, _), *_ = ranks_by_message
    said = [
        message
        if len(ranks) in (world_size, 1) and ranks[0] == 0
        else f"on rank {', '.join(map(str, ranks))}: {message}"
        for (_, message), ranks in ranks_by_message.items()
    ]
    kind = getattr(errors, name, PeerError)
    if issubclass(kind, HeteroError):
        error: Exception = kind("\n".join(said))
        return error
    return PeerError("\n".join(f"{name}: {message}" for message in said))


def _expect_equal(facts: list[dict[str, Any]]) -> None:
    for name in facts[0]:
        values = [fact[name] for fact in facts]
        if any(value != values[0] for value in values):
            raise ConfigError(f"the ranks must agree, but {name} by rank is {values}. Give every rank the same.")
