"""Build DeepSpeed's engine for a plan of pipelines: `deepspeed.initialize` with this rank's stage of the model.

The engine's forward runs all forwards and backwards of an optimizer step in 1F1B order, and returns the loss of the
global batch. Its backward only checks that it gets this loss. Its step receives gradients, clips and updates. So the
usual loop works unchanged, except that each batch is a global batch instead of a micro-batch:

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
from ds_hetero.decision.decide_pipelines import check_pipelines_searchable, global_batch_of, stage_kinds_of
from ds_hetero.decision.facts import JobFacts
from ds_hetero.engine.ds_config import read_training_facts
from ds_hetero.engine.monitoring import make_monitor
from ds_hetero.engine.trained.model import TrainedModel
from ds_hetero.engine.trained.staged_model import StagedModel
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed.installer import Installer
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys
from ds_hetero.frameworks.deepspeed.mpu import Mpu, SequenceMpu
from ds_hetero.frameworks.deepspeed.pipeline.checks import checks_of_pipelines
from ds_hetero.frameworks.deepspeed.pipeline.layer_moves import expect_movable, move_layers
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import (
    Groups,
    PipelineOptimizer,
    expect_elementwise,
    groups_by_name,
    make_synchronizer,
    optimizer_of_section,
    owned_of_group,
)
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.pipeline.single_rank_engine import (
    max_gradient_norm,
    single_rank_configuration,
    single_rank_groups,
)
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.job.layer_search import LayerSearch
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.job.replanning import Replanning
from ds_hetero.job.start import World, agree_on_facts, announce_start, requested_kernel, start_job
from ds_hetero.runtime.changed_buffers import persistent_buffers
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.packed_weights import is_packed
from ds_hetero.runtime.peers.board import default_group
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.pipeline.batches import samples_of_step
from ds_hetero.runtime.pipeline.runner import PipelineRunner, neighbours_of
from ds_hetero.runtime.pipeline.stage_transfers import make_boundary_groups
from ds_hetero.runtime.replica import make_replica
from ds_hetero.runtime.step_checks import StepChecks
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.plans import Plan, Stage
from ds_hetero.values.schedule import Group, Schedule


class _RankArguments(NamedTuple):
    """What ranks tell each other about their arguments of `deepspeed.initialize`."""

    groups: Groups  # groups of the user's optimizer, with names of parameters
    has_no_weights: bool  # whether the model was built on the meta device, without weights


class PipelineInstaller(Installer):
    """Builds an engine whose model is a stage of a pipeline."""

    def __init__(self, *call: Any) -> None:
        super().__init__(*call)
        self._models = self._registry.adapters.models
        self._rank = dist.get_rank()
        self._clock = StepClock(default_device())
        self._has_no_weights = False
        self._start = self._agree_on_start()
        self._section, self._plan = self._start.section, self._start.plan
        self._stage = self._plan.stage_of(self._rank)

    @waiting_for_peers("starting the job")
    def _agree_on_start(self) -> JobStart:
        """Let all ranks agree on the model, and on the plan that the user gave or that is searched here."""
        model, world, request = self._arguments["model"], World.current(), self._registry.request_of(self._ds_config)
        section, clusters, searches = request.section, self._registry.clusters, request.plan is None
        assert section is not None
        # Only stages with split sequences need one of our attention kernels; others use the model's own attention.
        has_kernel = request.plan is None or "sequence" in stage_kinds_of(request.plan)

        def read_facts() -> JobFacts:
            if searches:
                self._models.check_cuttable(model)
            model_facts = replace(self._models.describe_model(model), is_split=has_kernel)
            facts = JobFacts(section=section, model=model_facts, training=read_training_facts(self._ds_config))
            if searches:
                check_pipelines_searchable(facts)
            return facts

        facts = agree_on_facts(world, read_facts, has_kernel=has_kernel, in_pipelines=True)
        read_kinds = functools.partial(self._models.impossible_stage_kinds, model)
        start = start_job(world, facts, clusters, plan=request.plan, read_impossible_stage_kinds=read_kinds)
        if world.rank == 0:
            announce_start(start)
        return start

    @waiting_for_peers("building the engine")
    def install(self) -> tuple[PipelinedEngine, tuple[Any, ...]]:
        """Cut the model, then build the engine on this rank's stage; see `Installer.install`."""
        model: nn.Module = self._arguments["model"]
        # Read while the model is whole: names and shapes are those of the whole model.
        descriptions = elastic.describe_parameters(model)
        buffers = [name for name, _ in persistent_buffers(model)]
        arguments_by_rank = on_all_ranks(self._examine)
        named_groups = arguments_by_rank[self._rank].groups
        self._has_no_weights = _agree_on_having_no_weights(arguments_by_rank)
        process_groups = self._registry.process_groups
        # Before the model is cut: these functions change its layers.
        if self._plan.activation_checkpointing is not None:
            _checkpoint_activations(model, "enable" if self._plan.activation_checkpointing else "disable")
        if self._start.facts.training.mixed_precision == "bfloat16":
            _cast(model, torch.bfloat16)
        stage = self._models.cut_model(model, self._plan, self._rank, self._section.tile_tokens)
        # Making a process group is a collective of all ranks, so every rank makes all groups in this order: those of
        # sequence stages, those between neighbouring stages, and in `_build` those of tensor stages and the
        # synchronizer.
        has_sequences = "sequence" in stage_kinds_of(self._plan)
        replica = make_replica(plan_of_stages(self._plan), process_groups) if has_sequences else None
        if self._stage is not None and self._stage.inner == "sequence":
            assert replica is not None
            kernel = requested_kernel(self._section.attention, self._rank)
            stage.shard_sequences(replica, kernel, self._section.ring_gradients)
        boundaries = make_boundary_groups(self._plan, process_groups)
        initialize_result = self._build(stage, named_groups)
        engine, *_ = initialize_result
        elastic_state = self._keep_in_memory(engine, self._start, descriptions)
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
            groups=process_groups,
            outputs_with=self._models.outputs_with,
            elastic=elastic_state,
        )
        if self._section.checks.enabled:
            pipelined.checks = StepChecks(checks_of_pipelines(pipelined, buffers))
        trained = TrainedModel(
            module=model,
            start=self._start,
            clock=self._clock,
            stage=stage,
            elastic=elastic_state,
            monitor=pipelined.monitor,
        )
        self._registry.add(trained)
        return pipelined, initialize_result

    def _monitor(self, engine: Engine, change_plan: Callable[[Plan], None]) -> StepMonitor:
        """Return the monitor of the steps, which re-plans if the section asks for it.

        Args:
            change_plan: moves the job to another plan.
        """
        replan = self._section.replan
        replanning = Replanning(self._plan, LayerSearch(replan.min_gain), change_plan) if replan.enabled else None
        return make_monitor(
            self._registry, self._start, self._clock, engine.steps_per_print(), engine.monitor, replanning
        )

    def _examine(self) -> _RankArguments:
        """Check this rank's arguments, and read the names of the parameters in the user's groups.

        This runs before the model is cut, so that all parameters of the groups have names.

        Raises:
            HeteroError: an argument or a setting does not work with pipelines.
        """
        model: nn.Module = self._arguments["model"]
        expect_supported_keys(self._ds_config, pipelines=True)
        global_batch_of(self._start.facts.training, self._plan)
        self._models.check_stages(model, self._plan)
        if self._section.replan.enabled:
            expect_movable(model, self._plan)
        optimizer = self._arguments.get("optimizer")
        if isinstance(optimizer, Optimizer):
            expect_elementwise(type(optimizer))
        elif optimizer is None and "optimizer" not in self._ds_config:
            raise ConfigError(
                'pipelines need an optimizer. Set "optimizer" in ds_config.json, or give one to deepspeed.initialize.'
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # As in `deepspeed.initialize`: an optimizer's own groups, or ``model_parameters``, or all that are trained.
        if isinstance(optimizer, Optimizer):
            return _RankArguments(groups_by_name(optimizer.param_groups, names), self._models.is_on_meta(model))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model_parameters = list(self._arguments.get("model_parameters") or trained)
        if model_parameters and not isinstance(model_parameters[0], Mapping):
            model_parameters = [{"params": model_parameters}]
        return _RankArguments(groups_by_name(model_parameters, names), self._models.is_on_meta(model))

    def _build(self, stage: StagedModel, named_groups: Groups) -> tuple[Any, ...]:
        """Let DeepSpeed build an engine that exchanges nothing, with an optimizer that synchronizes gradients.

        The optimizer is a function, which DeepSpeed calls after it has moved the model to the device: steps that need
        the model there are in it.

        Args:
            named_groups: the user's parameter groups, with names of parameters.
        """
        process_groups = single_rank_groups(self._registry.process_groups)
        with _leaving_on_meta(stage) if self._has_no_weights else contextlib.nullcontext():
            initialize_result = self._call_stock(
                single_rank_configuration(self._ds_config, samples_of_step(self._plan)),
                optimizer=lambda _: self._make_optimizer(stage, named_groups),
                model_parameters=None,
                mpu=Mpu(process_groups),
            )
        engine, *_ = initialize_result
        # DeepSpeed's dictionary would keep the full parameters alive that tensor parallelism has cut.
        engine.param_names = {parameter: name for name, parameter in stage.model.named_parameters()}
        engine.enable_backward_allreduce = False
        stock_mpu, groups.mpu = groups.mpu, SequenceMpu({**process_groups, "sequence": default_group()})
        self._registry.patches.on_undo(lambda: setattr(groups, "mpu", stock_mpu))
        return initialize_result

    def _make_optimizer(self, stage: StagedModel, named_groups: Groups) -> PipelineOptimizer:
        """Cut a tensor-parallel stage, and make its gradient synchronizer and the optimizer of the elements it owns."""
        meshes = _meshes(self._plan)
        if self._stage is not None and self._stage.is_tensor_parallel:
            stage.cut_by_tensor_parallelism(meshes[self._stage.holders_with(self._rank)])
        if self._has_no_weights:
            on_all_ranks(lambda: stage.fill(default_device()))
        bucket_bytes = self._start.facts.training.buffers.sync_bytes(stage.dtype.itemsize)
        sync = make_synchronizer(stage, self._plan, self._registry.process_groups, bucket_bytes)
        names = [group["params"] for group in named_groups]
        owned_groups = [{**group, "params": owned_of_group(sync, group["params"])} for group in named_groups]
        max_norm = max_gradient_norm(self._ds_config)
        return PipelineOptimizer(self._make_inner(owned_groups), sync, max_norm, self._clock, names)

    def _make_inner(self, owned_groups: Groups) -> Optimizer:
        """Return the user's optimizer over the parts of parameters that this rank owns."""
        optimizer = self._arguments.get("optimizer")
        if optimizer is None:
            return optimizer_of_section(self._ds_config["optimizer"], owned_groups)
        if isinstance(optimizer, Optimizer):
            # The object is kept: learning-rate schedulers set the rates in its groups.
            for group, owned_group in zip(optimizer.param_groups, owned_groups, strict=True):
                group["params"] = owned_group["params"]
            optimizer.state.clear()
            return optimizer
        user_optimizer: Optimizer = optimizer(owned_groups)  # a function of the script made it
        expect_elementwise(type(user_optimizer))
        return user_optimizer


@contextlib.contextmanager
def _leaving_on_meta(stage: StagedModel) -> Iterator[None]:
    """Inside the context, keep DeepSpeed from moving or broadcasting a model without weights.

    `PipelineInstaller._make_optimizer` loads the weights, when DeepSpeed asks for the optimizer.
    """
    for parameter in stage.model.parameters():
        # DeepSpeedEngine._broadcast_model leaves out parameters with this attribute.
        parameter.ds_optim_param = True  # type: ignore[attr-defined]
    stage.model.to = lambda *args, **kwargs: stage.model  # type: ignore[method-assign]
    try:
        yield
    finally:
        del stage.model.to


def _agree_on_having_no_weights(by_rank: Sequence[_RankArguments]) -> bool:
    """Return whether the model was built without weights. Raises `ModelError`: on some ranks only."""
    ranks = [rank for rank, arguments in enumerate(by_rank) if arguments.has_no_weights]
    if ranks and len(ranks) < len(by_rank):
        raise ModelError(
            f"the model has no weights (it is on the meta device) on ranks {ranks} of {len(by_rank)}. Build it without "
            "weights on every rank, or with them on every rank."
        )
    return bool(ranks)


def _checkpoint_activations(model: nn.Module, verb: str) -> None:
    """Switch activation checkpointing with the method of the installed transformers.

    Args:
        verb: ``"enable"`` or ``"disable"``.
    """
    name = f"activation_checkpointing_{verb}"
    if not hasattr(model, name):  # before transformers 5.23
        name = f"gradient_checkpointing_{verb}"
    getattr(model, name)()


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place; buffers, such as rotary frequencies, keep their dtype.

    So do weights of 4 bits, which may be packed into elements of a floating-point type.
    """
    for parameter in model.parameters():
        has_values_packed = is_packed(parameter) and not parameter.is_meta
        if parameter.is_floating_point() and not has_values_packed:
            parameter.data = parameter.data.to(dtype)


def plan_of_stages(plan: Plan) -> Plan:
    """Return a plan of replicas for the attention of sequence stages.

    Each of these stages is a replica, or with tensor groups several: the first ranks of all groups, the second ranks,
    and so on. Every rank outside of sequence stages is a replica by itself, so that all ranks make the same process
    groups.
    """
    assert plan.model is not None
    num_heads, num_kv_heads = plan.model.num_heads, plan.model.num_kv_heads

    def single_rank_schedule(rank: int) -> Schedule:
        group = Group(ranks=(rank,), tokens=(1.0,), heads=(num_heads,))
        return Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, groups=(group,))

    stages: list[Stage] = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    schedules: list[Schedule] = []
    for stage in stages:
        # One schedule for each place in a tensor group; the first group has a rank at each of them.
        columns = map(stage.schedule_of, stage.token_holders[0])
        schedules += [schedule for schedule in columns if schedule is not None]
    ranks_of_sequences = {rank for schedule in schedules for rank in schedule.ranks}
    for rank in range(dist.get_world_size()):
        if rank not in ranks_of_sequences:
            schedules.append(single_rank_schedule(rank))
    return Plan.of_replicas(sorted(schedules, key=lambda schedule: schedule.ranks))


def _meshes(plan: Plan) -> dict[tuple[int, ...], DeviceMesh]:
    """Make the mesh of every tensor-parallel stage, or of each of its tensor groups, by its ranks.

    Every rank makes all meshes in the same order, since each makes a process group. Ranks are ascending: a group
    numbers its ranks in ascending order, and DTensor assumes the same order in the mesh.
    """
    device = default_device().type
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages if stage.is_tensor_parallel]
    return {ranks: DeviceMesh(device, list(ranks)) for stage in stages for ranks in stage.token_holders}
