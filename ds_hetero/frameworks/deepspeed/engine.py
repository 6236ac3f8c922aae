"""DeepSpeed: the engine is built as if there were no sequence parallelism, then `groups` answers for the replica.

DeepSpeed divides gradients by world size over sequence-parallel size on most paths and by the plain world size on
others (ZeRO-3 with reduce_scatter). Shown no sequence parallelism while an engine is built, it divides by the plain
world size on all of them, which is right for the loss recipe that DeepSpeed and transformers document (an all_gather
of the ranks' mean losses, weighted by tokens, whose backward adds up over the ranks) and for `Handle.loss`. Batch
sizes are kept right by `sequence_parallel_size` in the configuration, which `DeepSpeedConfig` reads where it is given
no mpu. Afterwards `deepspeed.utils.groups` answers for the replica.

`names` lists the names of DeepSpeed that are not documented. `install` replaces names of its modules; `hooks` wraps the
methods of an engine that has been built.

All hooks around the methods of DeepSpeed's engines: `HOOKS`, one table.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import nn

from ds_hetero.common.text import listed
from ds_hetero.decision.decide import sp_size_of
from ds_hetero.decision.start_text import announce
from ds_hetero.engine.ds_config import DsConfig, enabled, says_batches
from ds_hetero.engine.patching import Function
from ds_hetero.engine.process import agree_on_configuration
from ds_hetero.engine.registry import PreparedModel, Registry
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed import hooks as split
from ds_hetero.frameworks.deepspeed.elastic import ElasticEngine
from ds_hetero.frameworks.deepspeed.hooks import (
    EngineHooks,
    HookedEngine,
    HookRow,
    SplitEngine,
    after,
    after_optimizer_step,
    before,
    recording,
    refuse_batch_sizes,
    waiting,
    within,
)
from ds_hetero.frameworks.deepspeed.installer import (
    Installer,
    note_engine,
    plain_configuration,
    report_batches_of_replicas,
)
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys, unknown_keys
from ds_hetero.frameworks.deepspeed.loading import load_any_layout, raise_on_all_ranks
from ds_hetero.frameworks.deepspeed.losses import BackwardsOfStep, LossScaling, install_tiled_loss
from ds_hetero.frameworks.deepspeed.mpu import SequenceMpu, mpu_of_replica
from ds_hetero.frameworks.deepspeed.names import COLLECTIVES, HANDLES
from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import frozen_state, load_any_plan, save_pipelines
from ds_hetero.frameworks.deepspeed.pipeline.engine import PipelineInstaller
from ds_hetero.frameworks.deepspeed.pipeline.hooks import PipelinedEngine, expect_passes, keep_books, run_passes
from ds_hetero.frameworks.deepspeed.protocols import Arguments
from ds_hetero.frameworks.deepspeed.saving import copy_script_last
from ds_hetero.frameworks.deepspeed.ulysses import Ulysses, size_in_configuration
from ds_hetero.frameworks.deepspeed.zero import optimizers, stage3, stage12
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.frameworks.wrapping import around
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.job.start import World
from ds_hetero.runtime.peers.calls import BACKWARD, FORWARD, SAVE, STEP
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_clock import IDLE, StepClock, running_clock
from ds_hetero.values.section import SECTION, expect_section_name


def install(registry: Registry) -> None:
    """Replace registration, loader adapter, `deepspeed.initialize` and how ZeRO-3 gathers; time collectives."""
    replace = registry.patches.replace
    ulysses = Ulysses(registry)
    registering = around(ulysses.register)
    replace(
        ulysses_sp.UlyssesSPAttentionHF,
        "register_with_transformers",
        lambda stock: classmethod(registering(stock.__func__)),
    )
    replace(ulysses_sp.UlyssesSPDataLoaderAdapter, "__init__", around(ulysses.adapt))
    replace(deepspeed, "initialize", around(_initialize, registry, ulysses))
    install_tiled_loss(registry)
    replace(DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", around(stage12.flatten_detached))
    replace(deepspeed.zero.Init, "_all_gather", around(stage3.gather_weighted))
    replace(deepspeed.zero.Init, "_partition_param", around(stage3.write_back))
    for name in COLLECTIVES:
        replace(TorchBackend, name, _timed)
    for name in HANDLES:
        replace(getattr(partition_parameters, name), "wait", _timed)


def _initialize(registry: Registry, ulysses: Ulysses, stock: Function, *args: object, **kwargs: object) -> object:
    """With a section the model is converted and the engine built without sequence parallelism."""
    given = dict(inspect.signature(stock).bind(*args, **kwargs).arguments)
    ds_config = _agreed_configuration(given)
    pending = ulysses.take_pending()
    if ds_config is None or not enabled(ds_config):
        expect_section_name(ds_config or {})
        if pending is not None and pending.error is not None:
            raise pending.error
        elastic.refuse_other_engines(f'an engine without a "{SECTION}" section')
        registry.note_unsplit(given.get("model"))
        return stock(*args, **kwargs)
    if pending is not None:
        pending.cancel()
    if World.current().rank == 0 and (unknown := unknown_keys(ds_config)):
        announce(
            f"no release of DeepSpeed that was tried reads {listed(unknown)} of ds_config.json: what it does to "
            "training on unequal ranks is not known"
        )
    try:
        request = registry.request_of(ds_config)
        installer = PipelineInstaller if request.is_of_pipelines else EngineInstaller
        hooked, built = installer(registry, stock, given, ds_config).install()
        registry.patches.on_undo(EngineHooks(hooked, HOOKS).take_off)
        if hooked.elastic is not None:
            hooked.monitor.keep_events(hooked.elastic.events)
    finally:
        registry.forget_request()
    note_engine(built[0])
    return built


class EngineInstaller(Installer):
    """Of an engine whose model is split over the sequence, or runs whole on every rank."""

    def install(self) -> tuple[HookedEngine, tuple[Any, ...]]:
        """Convert the model and build the engine."""
        given, ds_config = self._given, self._ds_config
        model = given["model"]
        _expect_supported(model, ds_config)
        sizes = {
            **size_in_configuration(ds_config),
            "mesh_param of deepspeed.initialize": given["mesh_param"][1] if given.get("mesh_param") else None,
            "the mpu given to deepspeed.initialize": _size_of_mpu(given.get("mpu")),
            "sp_size of accelerate's ParallelismConfig": self._registry.adapters.processes.size_of_accelerate(),
            **({f'"{SECTION}.batch", which splits no sequence,': 1} if says_batches(ds_config) else {}),
        }
        prepared = self._registry.prepare(model, ds_config, sizes)
        built = self._build(prepared, sp_size_of(sizes))
        engine = built[0]
        report_batches_of_replicas(engine, prepared.model.replica)
        engine.seq_parallel_group = prepared.model.replica.sp_group
        prepared.prediction_check.start()
        prepared.elastic = elastic.prepare(engine, prepared.start)
        hooked = SplitEngine(
            engine=engine,
            model=prepared.model,
            clock=prepared.model.clock,
            scaling=LossScaling(prepared.model),
            monitor=self._registry.monitor_steps(prepared, engine.steps_per_print(), engine.monitor),
            prediction_check=prepared.prediction_check,
            note_destroyed=functools.partial(setattr, prepared, "is_destroyed", True),
            stage3=optimizers.stage3_checkpoints(engine),
            backwards=BackwardsOfStep(engine),
            elastic=prepared.elastic,
        )
        return hooked, built

    @waiting_for_peers("building the engine")
    def _build(self, prepared: PreparedModel, sp_size: int | None) -> tuple[Any, ...]:
        """Let stock build the engine without sequence parallelism and with our ZeRO optimizers."""
        replica = prepared.model.replica
        config = plain_configuration(self._ds_config, replica, sp_size)
        weights, nodes = optimizers.agree_on_owners(
            prepared.start, self._ds_config, prepared.model.model, self._given.get("optimizer")
        )
        if prepared.start.facts.training.zero_stage == 3:
            stage3.gather_experts_at_once(self._registry.adapters.models.containers_of_experts(prepared.model.model))
        replica_state = mpu_of_replica(replica, sp_size)
        with (
            _sequence_parallelism_hidden(replica_state, self._registry),
            optimizers.optimizers_in_place(config, weights, nodes),
        ):
            return self._call_stock(config, mpu=None)


def _configuration(given: Arguments) -> DsConfig | None:
    """The configuration as a mapping, by the rules of `deepspeed.initialize`; None where that will complain."""
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, Mapping):
        return config
    loaded: DsConfig = deepspeed.load_ds_config(config)
    return loaded


def _agreed_configuration(given: Arguments) -> DsConfig | None:
    """`_configuration`, compared on all ranks. Raises `ConfigError` on all, or what DeepSpeed's reader raises here."""
    _init_distributed(given)
    error: Exception | None = None
    try:
        ds_config = _configuration(given)
    except Exception as caught:
        error, ds_config = caught, None
    model = given.get("model")
    try:
        agree_on_configuration(ds_config, model if isinstance(model, nn.Module) else None, error)
    finally:
        if error is not None:
            raise error
    return ds_config


def _size_of_mpu(mpu: Any) -> int | None:
    if isinstance(mpu, SequenceMpu):
        return mpu.size_given
    return mpu.get_sequence_parallel_world_size() if hasattr(mpu, "get_sequence_parallel_world_size") else None


def _expect_supported(model: object, ds_config: DsConfig) -> None:
    if isinstance(model, deepspeed.PipelineModule):
        raise ModelError("a PipelineModule cannot be split over the sequence; give deepspeed.initialize a plain model.")
    expect_supported_keys(ds_config)


def _init_distributed(given: Arguments) -> None:
    """As `deepspeed.initialize` would a moment later; ranks choose their device before they first speak."""
    accelerator = deepspeed.get_accelerator()
    if "LOCAL_RANK" in os.environ:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    port = {name: given[name] for name in ("distributed_port",) if name in given}
    deepspeed.init_distributed(
        accelerator.communication_backend_name(), dist_init_required=given.get("dist_init_required"), **port
    )


@contextlib.contextmanager
def _sequence_parallelism_hidden(replica_state: SequenceMpu, registry: Registry) -> Iterator[None]:
    """Let `groups` know no sequence parallelism inside, where an engine is built, and the replica's afterwards."""
    before = groups.mpu, groups.mesh_device
    groups.mpu = groups.mesh_device = None
    try:
        yield
    except BaseException:
        groups.mpu, groups.mesh_device = before
        raise
    groups.mpu = replica_state

    def restore() -> None:
        if groups.mpu is replica_state:
            groups.mpu, groups.mesh_device = before

    registry.patches.on_undo(restore)


def _timed(stock: Function) -> Function:
    """Let the clock of the running engine see how long a collective keeps this rank."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(stock)
    def timed(*args: object, **kwargs: object) -> object:
        with running_clock().phase(IDLE, stock.__name__):
            return stock(*args, **kwargs)

    wrapped: Function = timed
    return wrapped


HOOKS = (
    HookRow("forward", recording(FORWARD), PipelinedEngine),
    HookRow("forward", waiting("running the passes of a step"), PipelinedEngine),
    HookRow("forward", run_passes, PipelinedEngine),
    HookRow("forward", split.find_unit, SplitEngine),
    HookRow("forward", within(split.record_common_forward), SplitEngine),
    HookRow("forward", within(split.time_forward), SplitEngine),
    HookRow("forward", waiting("running a forward"), SplitEngine),
    HookRow("backward", recording(BACKWARD)),
    HookRow("backward", keep_books, PipelinedEngine),
    HookRow("backward", within(split.time_backward), SplitEngine),
    HookRow("backward", waiting("running a backward"), SplitEngine),
    HookRow("backward", split.scale_loss, SplitEngine),
    HookRow("_backward_prologue", before(BackwardsOfStep.begin), SplitEngine, "backwards"),
    HookRow("_backward_epilogue", before(StepClock.note_gradients), SplitEngine, "clock"),
    HookRow("_backward_epilogue", after(BackwardsOfStep.end), SplitEngine, "backwards"),
    HookRow("step", ElasticEngine.around_step, part="elastic"),
    HookRow("step", recording(STEP)),
    HookRow("step", after_optimizer_step(split.take_times)),
    HookRow("step", within(split.time_step)),
    HookRow("step", after_optimizer_step(split.record_step), SplitEngine),
    HookRow("step", waiting("running the engine's step")),
    HookRow("step", before(expect_passes), PipelinedEngine),
    HookRow("step", before(LossScaling.expect_scaled), SplitEngine, "scaling"),
    HookRow("step", after(BackwardsOfStep.forget), SplitEngine, "backwards"),
    HookRow("zero_grad", after(BackwardsOfStep.forget), SplitEngine, "backwards"),
    HookRow("destroy", before(StepMonitor.report), part="monitor"),
    HookRow("destroy", before(split.report_prediction), SplitEngine),
    HookRow("set_train_batch_size", before(refuse_batch_sizes)),
    HookRow("set_train_micro_batch_size", before(refuse_batch_sizes)),
    HookRow("save_checkpoint", recording(SAVE)),
    HookRow("save_checkpoint", waiting("saving a checkpoint")),
    HookRow("save_checkpoint", save_pipelines, PipelinedEngine),
    HookRow("save_checkpoint", split.save_checkpoint, SplitEngine),
    HookRow("_copy_recovery_script", copy_script_last, SplitEngine, "engine"),
    HookRow("module_state_dict", frozen_state, PipelinedEngine),
    HookRow("load_checkpoint", waiting("loading a checkpoint"), PipelinedEngine),
    HookRow("load_checkpoint", load_any_plan, PipelinedEngine),
    HookRow("_load_checkpoint", waiting("loading a checkpoint"), SplitEngine),
    HookRow("_load_checkpoint", split.load_checkpoint, SplitEngine),
    HookRow("_load_checkpoint", raise_on_all_ranks, SplitEngine, "engine"),
    HookRow("_load_checkpoint", Stage3Checkpoints.examine, SplitEngine, "stage3"),
    HookRow("_load_zero_checkpoint", load_any_layout, SplitEngine, "engine"),
    HookRow("_load_zero_checkpoint", Stage3Checkpoints.load_state, SplitEngine, "stage3"),
    HookRow("load_module_state_dict", Stage3Checkpoints.load_frozen_parameters, SplitEngine, "stage3"),
    HookRow("_get_all_ckpt_names", Stage3Checkpoints.list_model_files, SplitEngine, "stage3"),
    HookRow("_get_param_fragment_func", Stage3Checkpoints.equal_shard, SplitEngine, "stage3"),
)
"""Of one method outermost first."""
