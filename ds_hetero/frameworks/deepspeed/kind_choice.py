"""Choose the kind of a job with ``"parallel": "best"`` in a call of `deepspeed.initialize`, before the engine is built.

The choice itself is made by `ds_hetero.decision.kind_choice`, on rank 0. It is told here which kinds this call rules
out, and all ranks are given what it chose: afterwards the request of the configuration has a section with one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ds_hetero.common.announce import announce
from ds_hetero.decision.decide_pipelines import check_pipelines_searchable
from ds_hetero.decision.facts import JobFacts
from ds_hetero.decision.kind_choice import choose_kind, section_of_kind
from ds_hetero.decision.resolve import sp_size_of
from ds_hetero.engine.ds_config import DsConfig, read_training_facts
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError, HeteroError
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import expect_elementwise
from ds_hetero.frameworks.deepspeed.protocols import Arguments
from ds_hetero.job.start import World
from ds_hetero.planner.jobs.kinds import PIPELINES, SEQUENCE
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.watch import waiting_for_peers

SpSizes = dict[str, int | None]


@waiting_for_peers("choosing the kind of job")
def choose_kind_of_call(registry: Registry, arguments: Arguments, ds_config: DsConfig, sp_sizes: SpSizes) -> None:
    """Choose the kind of the job that a call of `deepspeed.initialize` starts; nothing if its section names one.

    Args:
        arguments: of the call, by name.
        sp_sizes: see `sp_size_of`.

    Caller: every rank of the world.
    Collectives: two `on_all_ranks`, and those of `ClusterCache.measure` if the ranks are measured.

    Raises:
        HeteroError: the same one on every rank.
    """
    request, world = registry.request_of(ds_config), World.current()
    section = request.section
    if section is None or section.parallel != "best":
        return
    if world.size == 1 or sp_size_of(sp_sizes) == 1:
        # Nothing is shared: every rank runs the whole model, with its own attention.
        registry.set_section(ds_config, section.model_copy(update={"parallel": "sequence"}))
        return
    model: nn.Module = arguments["model"]
    models = registry.adapters.models

    def read_facts() -> JobFacts:
        described = models.describe_model(model)
        training = read_training_facts(ds_config)
        return JobFacts(section=section, model=described, training=training, sp_sizes=dict(sp_sizes))

    facts = world.on_all_ranks(read_facts)[world.rank]  # the engine that is chosen compares them
    measured = registry.clusters.measure(world, facts) if section.cluster == "measure" else None

    def choose_on_rank_0() -> str | None:
        if world.rank > 0:
            return None
        closed = _closed_kinds(registry, arguments, ds_config, facts)
        impossible = {} if PIPELINES in closed else models.impossible_stage_kinds(model)
        choice = choose_kind(
            facts,
            world.size,
            measured=measured,
            on_host=default_device().type == "cpu",
            closed=closed,
            stage_kinds=tuple(inner for inner in ("tensor", "sequence") if inner not in impossible),
        )
        for line in choice.lines:
            announce(line)
        return choice.kind

    kind = world.on_all_ranks(choose_on_rank_0)[0]
    assert kind is not None
    registry.set_section(ds_config, section_of_kind(section, kind))


def _closed_kinds(registry: Registry, arguments: Arguments, ds_config: DsConfig, facts: JobFacts) -> dict[str, str]:
    """Return the kinds that this call cannot start, each with the reason: what the engines themselves would refuse."""
    model: nn.Module = arguments["model"]
    models = registry.adapters.models
    in_pipelines = _with_section_of(facts, PIPELINES)
    checks: dict[str, list[Callable[[], object]]] = {
        SEQUENCE: [partial(_expect_weights, registry, model), partial(models.read_model_facts, model)],
        PIPELINES: [
            partial(_expect_one_batch, registry, arguments, facts),
            partial(expect_supported_keys, ds_config, pipelines=True),
            partial(check_pipelines_searchable, in_pipelines),
            partial(models.check_cuttable, model),
            partial(_expect_optimizer, arguments, ds_config),
        ],
    }
    reasons = {kind: _failure(of_kind) for kind, of_kind in checks.items()}
    return {kind: reason for kind, reason in reasons.items() if reason}


def _failure(checks: Sequence[Callable[[], object]]) -> str:
    """Return the error of the first check that fails, as a clause; empty if none does."""
    try:
        for check in checks:
            check()
    except HeteroError as error:
        return " ".join(str(error).split()).rstrip(".")
    return ""


def _with_section_of(facts: JobFacts, kind: str) -> JobFacts:
    return JobFacts(
        section=section_of_kind(facts.section, kind),
        model=facts.model,
        training=facts.training,
        sp_sizes=facts.sp_sizes,
    )


def _expect_weights(registry: Registry, model: nn.Module) -> None:
    """Raise `ConfigError` if a model has no weights, which only stages of pipelines read by themselves."""
    if registry.adapters.models.is_on_meta(model):
        raise ConfigError("the model was built without weights, which stages of pipelines read by themselves")


def _expect_one_batch(registry: Registry, arguments: Arguments, facts: JobFacts) -> None:
    """Raise `ConfigError` if the ranks are not one worker, which pipelines need, or the model is split already."""
    size = sp_size_of(facts.sp_sizes)
    if size not in (None, dist.get_world_size()):
        raise ConfigError(f"the sequence-parallel size is {size}, and with pipelines all ranks are one worker")
    if registry.find_on_replica(arguments["model"]) is not None:
        raise ConfigError("the script has registered the model for sequence parallelism")


def _expect_optimizer(arguments: Arguments, ds_config: DsConfig) -> None:
    """Raise `ConfigError` if the call has no optimizer, or one that pipelines refuse."""
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, Optimizer):
        expect_elementwise(type(optimizer))
    elif optimizer is None and "optimizer" not in ds_config:
        raise ConfigError("the call has no optimizer")
