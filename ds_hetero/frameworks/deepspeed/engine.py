"""DeepSpeed: the engine is built as if there were no sequence parallelism, then DeepSpeed's groups are the replica's.

DeepSpeed divides gradients by world size over sequence-parallel size on most paths and by the plain world size on
others (ZeRO-3 with reduce_scatter). Shown no sequence parallelism while an engine is built, it divides by the plain
world size on all of them, which is right for the loss recipe that DeepSpeed and transformers document (an all_gather
of the ranks' mean losses, weighted by tokens, whose backward adds up over the ranks) and for `Handle.loss`. Batch
sizes are kept right by ``sequence_parallel_size`` in the configuration, which ``DeepSpeedConfig`` reads where it is
given no mpu. Afterwards `deepspeed.utils.groups` answers for the replica.

`names` lists the names of DeepSpeed that are not documented. `install` replaces names of its modules; `hooks` wraps the
methods of an engine that has been built.

Stock Ulysses gives way to ours: its registration with transformers and its loader adapter. Both are called before
`deepspeed.initialize`, in some scripts before the configuration is known. Then stock does its work first, and
`_Ulysses.take_pending` gives what is to be undone once there turns out to be a "heterogeneity" section. Its loss over
tiles of the logits is refused on shards: it runs the backward of the LM head inside its forward, as if the gradient of
the loss were 1, which on a shard is what the engine's average needs, known when the loss of all ranks is put together.

All hooks around the methods of DeepSpeed's engines: `HOOKS`, one table.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as stock_mpu
import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.zero import partition_parameters
from torch import nn

from ds_hetero.common.announce import announce
from ds_hetero.common.text import listed
from ds_hetero.decision.decide import sp_size_of
from ds_hetero.engine.ds_config import DsConfig, enabled, read_training_facts, says_batches
from ds_hetero.engine.forward_mode import wanted_results
from ds_hetero.engine.loader import KNOWN_LOADERS, ModelLoader, WholeLoader
from ds_hetero.engine.patching import Function, around
from ds_hetero.engine.process import agree_on_configuration
from ds_hetero.engine.registry import PreparedModel, Registry
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed import hooks as split
from ds_hetero.frameworks.deepspeed.batch_sizes import plain_configuration, report_batches_of_replicas
from ds_hetero.frameworks.deepspeed.checks import checks_of_model
from ds_hetero.frameworks.deepspeed.elastic import ElasticEngine
from ds_hetero.frameworks.deepspeed.hooks import (
    SplitEngine,
    after,
    after_optimizer_step,
    before,
    check_step,
    recording,
    refuse_batch_sizes,
    waiting,
    within,
)
from ds_hetero.frameworks.deepspeed.installer import EngineHooks, HookedEngine, HookRow, Installer
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys, unknown_keys
from ds_hetero.frameworks.deepspeed.late_registration import note_engine
from ds_hetero.frameworks.deepspeed.loading import load_any_layout, raise_on_all_ranks
from ds_hetero.frameworks.deepspeed.losses import BackwardsOfStep, LossScaling
from ds_hetero.frameworks.deepspeed.mpu import (
    SequenceMpu,
    expect_one_worker,
    mpu_of_one_worker,
    mpu_of_replica,
    sequence_parallelism_hidden,
)
from ds_hetero.frameworks.deepspeed.names import COLLECTIVES, HANDLES, ZERO_3_IDENTITIES
from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import frozen_state, load_any_plan, save_pipelines
from ds_hetero.frameworks.deepspeed.pipeline.engine import PipelineInstaller
from ds_hetero.frameworks.deepspeed.pipeline.hooks import expect_passes, keep_books, run_passes
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.protocols import Arguments
from ds_hetero.frameworks.deepspeed.saving import copy_script_last
from ds_hetero.frameworks.deepspeed.zero import optimizers, stage3
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.frameworks.deepspeed.zero.stale_gradients import clear_stale_gradients
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.job.start import World
from ds_hetero.runtime.data.loss_graph import note_identities
from ds_hetero.runtime.peers.calls import BACKWARD, FORWARD, SAVE, STEP
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.pipeline.batches import SameBatches
from ds_hetero.runtime.step_checks import StepChecks
from ds_hetero.runtime.step_clock import IDLE, StepClock, running_clock
from ds_hetero.values.section import SECTION, expect_section_name

_SIZE_OF_CONFIGURATION = "sequence_parallel_size of ds_config"


def install(registry: Registry) -> None:
    """Replace registration, loader adapter, `deepspeed.initialize` and how ZeRO-3 gathers; time collectives."""
    replace = registry.patches.replace
    ulysses, refusing = _Ulysses(registry), around(_refuse_shards, registry)
    registering = around(ulysses.register)
    replace(
        ulysses_sp.UlyssesSPAttentionHF,
        "register_with_transformers",
        lambda stock: classmethod(registering(stock.__func__)),
    )
    replace(ulysses_sp.UlyssesSPDataLoaderAdapter, "__init__", around(ulysses.adapt))
    replace(deepspeed, "initialize", around(_initialize, registry, ulysses))
    replace(ulysses_sp.TiledFusedLogitsLoss, "forward", lambda stock: staticmethod(refusing(stock.__func__)))
    optimizers.install(registry.patches)
    for name in COLLECTIVES:
        replace(TorchBackend, name, _timed)
    for name in HANDLES:
        replace(getattr(partition_parameters, name), "wait", _timed)


def _initialize(registry: Registry, ulysses: _Ulysses, stock: Function, *args: object, **kwargs: object) -> object:
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
        registry.say_stock("deepspeed.initialize was given none")
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
        mesh = given.get("mesh_param")
        sizes = {
            _SIZE_OF_CONFIGURATION: read_training_facts(ds_config).sp_size,
            "mesh_param of deepspeed.initialize": mesh[1] if mesh else None,
            "the mpu given to deepspeed.initialize": _size_of_mpu(given.get("mpu")),
            "sp_size of accelerate's ParallelismConfig": self._registry.adapters.processes.size_of_accelerate(),
            f'"{SECTION}.batch", which splits no sequence,': 1 if says_batches(ds_config) else None,
        }
        prepared = self._registry.prepare(model, ds_config, sizes)
        note_identities(ZERO_3_IDENTITIES)
        built = self._build(prepared, sp_size_of(sizes))
        engine = built[0]
        clear_stale_gradients(engine)
        report_batches_of_replicas(engine, prepared.model.replica)
        engine.seq_parallel_group = prepared.model.replica.sp_group
        prepared.prediction_check.start()
        prepared.elastic = self._keep_in_memory(engine, prepared.start)
        hooked = SplitEngine(
            engine=engine,
            model=prepared.model,
            clock=prepared.model.clock,
            monitor=self._registry.monitor_steps(prepared, engine.steps_per_print(), engine.monitor),
            prediction_check=prepared.prediction_check,
            note_destroyed=functools.partial(setattr, prepared, "is_destroyed", True),
            stage3=optimizers.stage3_checkpoints(engine),
            elastic=prepared.elastic,
        )
        if isinstance(prepared.model, WholeModel):
            prepared.model.after_probe_run = stage3.forgetting_a_run(engine)
        if prepared.start.section.checks.enabled:
            hooked.checks = StepChecks(checks_of_model(hooked))
        return hooked, built

    def _batch_configuration(self) -> DsConfig:
        """The configuration; of an engine that trains nothing, without a global batch.

        A reference model is given that of the trained one, in which transformers counts ranks in "train_batch_size":
        "auto", and accelerate corrects it for the engine that is trained alone.
        """
        trains = self._given.get("optimizer") is not None or "optimizer" in self._ds_config
        if trains or self._ds_config.get("train_micro_batch_size_per_gpu") is None:
            return self._ds_config
        return {key: value for key, value in self._ds_config.items() if key != "train_batch_size"}

    @waiting_for_peers("building the engine")
    def _build(self, prepared: PreparedModel, sp_size: int | None) -> tuple[Any, ...]:
        """Let stock build the engine without sequence parallelism and with our ZeRO optimizers."""
        replica = prepared.model.replica
        config = plain_configuration(self._batch_configuration(), replica, sp_size)
        weights, nodes = optimizers.agree_on_owners(
            prepared.start, self._ds_config, prepared.model.model, self._given.get("optimizer")
        )
        if prepared.start.facts.training.zero_stage == 3:
            stage3.gather_experts_at_once(self._registry.adapters.models.containers_of_experts(prepared.model.model))
        replica_state = mpu_of_replica(replica, sp_size)
        with (
            sequence_parallelism_hidden(replica_state, self._registry.patches),
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


@dataclass
class _PendingRegistration:
    """A stock registration made before the configuration was known."""

    undo: Callable[[], None]  # puts back the attention function that it replaced
    error: Exception | None = None  # what stock raised; raised again if there is no section after all
    adapters: int = 0  # loaders that stock has wrapped since

    def cancel(self) -> None:
        """Undo the registration, since there is a section. Raises `ConfigError`: stock has wrapped a loader since."""
        self.undo()
        if self.adapters:
            raise ConfigError(
                "a UlyssesSPDataLoaderAdapter was made before deepspeed.initialize, when ds_hetero did not know the "
                "configuration yet. Make it afterwards, or give the configuration earlier: "
                "ds_hetero.register(ds_config)."
            )


class _Ulysses:
    """Makes the replacements of stock's registration and adapter; remembers what is pending between them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._pending: _PendingRegistration | None = None
        self._has_pipelines = False

    def take_pending(self) -> _PendingRegistration | None:
        """Return the registration that waits for the configuration, if any, once."""
        pending, self._pending = self._pending, None
        return pending

    def register(self, stock: Function, cls: type, *args: Any, **kwargs: Any) -> object:
        """In the place of ``UlyssesSPAttentionHF.register_with_transformers``.

        With a known section the model is converted; without any, stock runs and may be undone later.
        """
        given = inspect.signature(stock).bind(cls, *args, **kwargs).arguments
        ds_config, size = self._registry.ds_config, given["sequence_parallel_size"]
        if ds_config is None:
            return self._register_stock(stock, given["core_attn_implementation"], cls, args, kwargs)
        agree_on_configuration(ds_config)
        if not enabled(ds_config):
            return stock(cls, *args, **kwargs)
        model = given["model_name_or_path"]
        if self._registry.request_of(ds_config).is_of_pipelines:
            self._has_pipelines = True
            expect_one_worker(size)
            return mpu_of_one_worker()
        if isinstance(model, torch.nn.Module):
            sizes = {"sequence_parallel_size": size, _SIZE_OF_CONFIGURATION: read_training_facts(ds_config).sp_size}
            return mpu_of_replica(self._registry.prepare(model, ds_config, sizes).model.replica, size)
        stock_mpu.initialize_sequence_parallel(size)  # the model is converted when deepspeed.initialize has it
        return stock_mpu

    def _register_stock(self, stock: Function, core: str, cls: Any, args: Any, kwargs: Any) -> Any:
        self._pending = _PendingRegistration(self._registry.adapters.models.keep_attention_function(core))
        try:
            return stock(cls, *args, **kwargs)
        except ValueError as error:
            if "divisible" not in str(error):
                raise
            self._pending.error = error  # heads that do not divide are no fault if there is a section
            return stock_mpu

    def adapt(
        self, stock: Function, adapter: Any, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any
    ) -> None:
        """In the place of ``UlyssesSPDataLoaderAdapter.__init__``.

        With a converted model the new object becomes a `ModelLoader`, before it has anything of the adapter's; in a
        loop of sharded calls, a `WholeLoader`.
        """
        split = self._registry.find_split_by_ranks(dist.get_process_group_ranks(sp_group))
        if split is None and self._has_pipelines:
            adapter.__class__ = SameBatches
            adapter.__init__(dl, torch.device(device), KNOWN_LOADERS)
        elif split is not None and wanted_results() is not None:
            adapter.__class__ = WholeLoader
            adapter.__init__(dl, torch.device(device), split)
        elif split is not None:
            adapter.__class__ = ModelLoader
            adapter.__init__(dl, split, torch.device(device))
        else:
            if self._pending is not None:
                self._pending.adapters += 1
            stock(adapter, dl, sp_rank, sp_group, sp_world_size, device)


def _refuse_shards(registry: Registry, stock: Function, *args: object, **kwargs: object) -> object:
    if any(p.model.takes_shards and p.model.replica.sp_size > 1 for p in registry.in_training):
        raise ModelError(
            "TiledFusedLogitsLoss gives the LM head a gradient of another scale than all other layers where a "
            "sequence is split: it runs the head's backward before the loss of all ranks is known. Use DeepSpeed's "
            "sequence_tiled_compute on a function that makes logits and loss, which tiles them alike and runs the "
            "backward at its time; or have the model return logits, for handle.loss."
        )
    return stock(*args, **kwargs)


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
    HookRow("forward", before(split.note_switches), SplitEngine),
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
    HookRow("step", before(check_step)),
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
