"""`deepspeed.initialize` with a plan of pipelines: this rank's stage of the model, behind an engine of DeepSpeed's.

The forward of the engine runs all passes of an optimizer step, 1F1B through the pipelines, and returns the loss of the
global batch; its backward keeps the books; its step synchronizes, clips and updates. So the commonest loop does what it
says, with a global batch in the place of a micro-batch:

    for batch in handle.dataloader(batches):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ds_hetero.decision.decide import JobStart
from ds_hetero.decision.decide_pipelines import check_pipelines_searchable, global_batch_of, inners_of
from ds_hetero.decision.facts import JobFacts
from ds_hetero.engine.adapters import StagedModel
from ds_hetero.engine.ds_config import read_training_facts
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed.installer import HookedEngine, Installer
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys
from ds_hetero.frameworks.deepspeed.mpu import Mpu, SequenceMpu
from ds_hetero.frameworks.deepspeed.pipeline.checks import checks_of_pipelines
from ds_hetero.frameworks.deepspeed.pipeline.layer_moves import expect_movable, move_layers
from ds_hetero.frameworks.deepspeed.pipeline.lone_engine import clipping_of, groups_of_lone_rank, lone_configuration
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import (
    Groups,
    PipelineOptimizer,
    expect_elementwise,
    groups_by_name,
    optimizer_of_section,
    owned_of_group,
    synchronizer_of,
)
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.job.layer_search import LayerSearch
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.job.replanning import Replanning
from ds_hetero.job.start import World, agree_on_facts, announce_start, requested_kernel, start_job
from ds_hetero.runtime.changed_buffers import persistent_buffers
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.board import default_group
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.pipeline.batches import samples_of_step
from ds_hetero.runtime.pipeline.hops import make_boundary_groups
from ds_hetero.runtime.pipeline.runner import PipelineRunner, neighbours_of
from ds_hetero.runtime.replica import make_replica
from ds_hetero.runtime.step_checks import StepChecks
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.plans import Plan, Stage
from ds_hetero.values.schedule import Group, Schedule


class _Examined(NamedTuple):
    """Arguments of a rank."""

    groups: Groups  # of the user's optimizer, with names for parameters
    is_empty: bool  # the model was built without weights


class PipelineInstaller(Installer):
    """Installs an engine whose model is a stage of a pipeline."""

    def __init__(self, *call: Any) -> None:
        super().__init__(*call)
        self._models = self._registry.adapters.models
        self._rank = dist.get_rank()
        self._clock = StepClock(default_device())
        self._is_empty = False
        self._start = self._agree_on_start()
        self._section, self._plan = self._start.section, self._start.plan
        self._stage = self._plan.stage_of(self._rank)

    @waiting_for_peers("starting the job")
    def _agree_on_start(self) -> JobStart:
        """Let all ranks agree on the model and the plan, which may be searched for."""
        model, world, request = self._given["model"], World.current(), self._registry.request_of(self._ds_config)
        section, clusters, searches = request.section, self._registry.clusters, request.plan is None
        assert section is not None
        # Other stages compute the attention that the model was built with.
        has_kernel = request.plan is None or "sequence" in inners_of(request.plan)

        def read_facts() -> JobFacts:
            if searches:
                self._models.check_cuttable(model)
            of_model = replace(self._models.describe_model(model), is_split=has_kernel)
            facts = JobFacts(section=section, model=of_model, training=read_training_facts(self._ds_config))
            if searches:
                check_pipelines_searchable(facts)
            return facts

        facts = agree_on_facts(world, read_facts, has_kernel=has_kernel, in_pipelines=True)
        no_inners = functools.partial(self._models.impossible_inners, model)
        start = start_job(world, facts, clusters, plan=request.plan, read_no_inners=no_inners)
        if world.rank == 0:
            announce_start(start)
        return start

    @waiting_for_peers("building the engine")
    def install(self) -> tuple[HookedEngine, tuple[Any, ...]]:
        """Cut the model, then build the engine on this rank's stage; see `Installer.install`."""
        model: nn.Module = self._given["model"]
        # Read while the model is whole: names and shapes are those of the whole model.
        described = elastic.describe_parameters(model)
        buffers = [name for name, _ in persistent_buffers(model)]
        examined = on_all_ranks(self._examine)
        named = examined[self._rank].groups
        self._is_empty = _agreed_is_empty(examined)
        made = self._registry.process_groups
        # These change layers, which are whole now and on the host.
        if self._plan.activation_checkpointing is not None:
            _checkpoint_activations(model, "enable" if self._plan.activation_checkpointing else "disable")
        if self._start.facts.training.mixed_precision == "bfloat16":
            _cast(model, torch.bfloat16)
        stage = self._models.cut_model(model, self._plan, self._rank, self._section.tile_tokens)
        # Process groups, on every rank in this order: of sequence stages, then between neighbouring stages; `_build`
        # makes those of tensor stages and of the synchronizer. Making one is a collective of all ranks.
        has_sequences = "sequence" in inners_of(self._plan)
        replica = make_replica(_plan_of_stages(self._plan), made) if has_sequences else None
        if self._stage is not None and self._stage.inner == "sequence":
            assert replica is not None
            stage.shard_sequences(replica, requested_kernel(self._section.attention, self._rank))
        boundaries = make_boundary_groups(self._plan, made)
        built = self._build(stage, named)
        engine = built[0]
        stage.elastic = self._keep_in_memory(engine, self._start, described)
        runner = None
        if self._stage is not None:
            neighbours = neighbours_of(self._plan, self._rank, boundaries, default_device())
            runner = PipelineRunner(neighbours, stage, stage.width, stage.dtype, self._clock)
        stage.time_layers(self._clock)
        pipelined = PipelinedEngine(
            engine=engine,
            plan=self._plan,
            stage=stage,
            runner=runner,
            clock=self._clock,
            monitor=self._monitor(engine, lambda plan: move_layers(pipelined, plan)),
            groups=made,
            outputs_with=self._models.outputs_with,
            elastic=stage.elastic,
        )
        if self._section.checks.enabled:
            pipelined.checks = StepChecks(checks_of_pipelines(pipelined, buffers))
        self._registry.note_pipelined(stage)
        return pipelined, built

    def _monitor(self, engine: Engine, change_plan: Callable[[Plan], None]) -> StepMonitor:
        """Monitor that observes the steps, and re-plans if the section asks for it."""
        replan = self._section.replan
        replanning = Replanning(self._plan, LayerSearch(replan.min_gain), change_plan) if replan.enabled else None
        return self._registry.watch(self._start, self._clock, engine.steps_per_print(), engine.monitor, replanning)

    def _examine(self) -> _Examined:
        """Check what this rank was given, and name the parameters of the user's groups while the model is whole."""
        model: nn.Module = self._given["model"]
        expect_supported_keys(self._ds_config, pipelines=True)
        global_batch_of(self._start.facts.training, self._plan)
        self._models.check_stages(model, self._plan)
        if self._section.replan.enabled:
            expect_movable(model)
        optimizer = self._given.get("optimizer")
        if isinstance(optimizer, Optimizer):
            expect_elementwise(type(optimizer))
        elif optimizer is None and "optimizer" not in self._ds_config:
            raise ConfigError(
                'pipelines need an optimizer: "optimizer" in ds_config.json, or one given to deepspeed.initialize.'
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # As in `deepspeed.initialize`: an optimizer's own groups, or ``model_parameters``, or all that are trained.
        if isinstance(optimizer, Optimizer):
            return _Examined(groups_by_name(optimizer.param_groups, names), self._models.is_on_meta(model))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given = list(self._given.get("model_parameters") or trained)
        if given and not isinstance(given[0], Mapping):
            given = [{"params": given}]
        return _Examined(groups_by_name(given, names), self._models.is_on_meta(model))

    def _build(self, stage: StagedModel, named: Groups) -> tuple[Any, ...]:
        """Let stock build the engine, as on a job of one rank; gradients are synchronized by ours.

        Our steps that depend on the device run when DeepSpeed asks for the optimizer: it has moved the model by then.
        """
        lone = groups_of_lone_rank(self._registry.process_groups)
        with _left_on_meta(stage) if self._is_empty else contextlib.nullcontext():
            built = self._call_stock(
                lone_configuration(self._ds_config, samples_of_step(self._plan)),
                optimizer=lambda _: self._optimizer(stage, named),
                model_parameters=None,
                mpu=Mpu(lone),
            )
        names = {parameter: name for name, parameter in stage.model.named_parameters()}
        built[0].param_names = names  # DeepSpeed's own would keep what was whole before tensor parallelism cut it
        built[0].enable_backward_allreduce = False
        before, groups.mpu = groups.mpu, SequenceMpu({**lone, "sequence": default_group()})
        self._registry.patches.on_undo(lambda: setattr(groups, "mpu", before))
        return built

    def _optimizer(self, stage: StagedModel, named: Groups) -> PipelineOptimizer:
        """Cut tensor-parallel stages, start the synchronizer, and make the user's optimizer over what it owns."""
        meshes = _meshes(self._plan)
        if self._stage is not None and self._stage.inner == "tensor":
            stage.cut_by_tensor_parallelism(meshes[self._stage.ranks])
        if self._is_empty:
            on_all_ranks(lambda: stage.fill(default_device()))
        bucket_bytes = self._start.facts.training.buffers.sync_bytes(stage.dtype.itemsize)
        sync = synchronizer_of(stage, self._plan, self._registry.process_groups, bucket_bytes)
        names = [group["params"] for group in named]
        owned = [{**group, "params": owned_of_group(sync, group["params"])} for group in named]
        return PipelineOptimizer(self._inner(owned), sync, clipping_of(self._ds_config), self._clock, names)

    def _inner(self, owned: Groups) -> Optimizer:
        """Return the user's optimizer over the parts of parameters that this rank owns."""
        optimizer = self._given.get("optimizer")
        if optimizer is None:
            return optimizer_of_section(self._ds_config["optimizer"], owned)
        if isinstance(optimizer, Optimizer):
            # The same object goes on: learning-rate schedulers set the rates in its groups.
            for group, of_rank in zip(optimizer.param_groups, owned, strict=True):
                group["params"] = of_rank["params"]
            optimizer.state.clear()
            return optimizer
        made: Optimizer = optimizer(owned)
        expect_elementwise(type(made))
        return made


@contextlib.contextmanager
def _left_on_meta(stage: StagedModel) -> Iterator[None]:
    """Let DeepSpeed neither move nor broadcast a model without weights, which is filled with the optimizer."""
    for parameter in stage.model.parameters():
        parameter.ds_optim_param = True  # type: ignore[attr-defined]
    stage.model.to = lambda *args, **kwargs: stage.model  # type: ignore[method-assign]
    try:
        yield
    finally:
        del stage.model.to


def _agreed_is_empty(by_rank: Sequence[_Examined]) -> bool:
    """Whether all ranks have built the model without weights. Raises `ModelError`: some have, others have not."""
    empty = [rank for rank, examined in enumerate(by_rank) if examined.is_empty]
    if empty and len(empty) < len(by_rank):
        raise ModelError(
            f"the model has no weights (it is on the meta device) on ranks {empty} of {len(by_rank)}. Build it without "
            "weights on every rank, or with them on every rank."
        )
    return bool(empty)


def _checkpoint_activations(model: nn.Module, verb: str) -> None:
    """Switch activation checkpointing by ``"enable"`` or ``"disable"``, with the installed transformers' method."""
    name = f"activation_checkpointing_{verb}"
    if not hasattr(model, name):  # before transformers 5.23
        name = f"gradient_checkpointing_{verb}"
    getattr(model, name)()


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place; buffers, such as rotary frequencies, keep theirs."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _plan_of_stages(plan: Plan) -> Plan:
    """Return a plan of replicas: each sequence stage is a replica, and so is each other rank of the job by itself.

    Attention then has a replica on every rank, and all ranks make the same process groups.
    """
    assert plan.model is not None
    num_heads, num_kv_heads = plan.model.num_heads, plan.model.num_kv_heads

    def alone(rank: int) -> Schedule:
        group = Group(ranks=(rank,), tokens=(1.0,), heads=(num_heads,))
        return Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, groups=(group,))

    stages: list[Stage] = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    schedules = [stage.schedule for stage in stages if stage.schedule is not None]
    ranks_of_sequences = {rank for schedule in schedules for rank in schedule.ranks}
    schedules += [alone(rank) for rank in range(dist.get_world_size()) if rank not in ranks_of_sequences]
    return Plan.of_replicas(sorted(schedules, key=lambda schedule: schedule.ranks))


def _meshes(plan: Plan) -> dict[tuple[int, ...], DeviceMesh]:
    """Make the mesh of every tensor-parallel stage, on every rank in one order: each makes a process group.

    The group numbers its ranks in ascending order, and DTensor takes them for those of the mesh.
    """
    device = default_device().type
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages if stage.inner == "tensor"]
    return {stage.ranks: DeviceMesh(device, sorted(stage.ranks)) for stage in stages}
