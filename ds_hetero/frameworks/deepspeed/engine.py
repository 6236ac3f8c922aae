"""Replace `deepspeed.initialize`: build engines whose models are split over the sequence, or run whole on every rank.

The engine is built as if there were no sequence parallelism. The reason is how DeepSpeed averages gradients. With
sequence parallelism it divides by world size over sequence-parallel size on most paths, but by the world size on others
(ZeRO-3 with reduce_scatter). Without, it divides by the world size everywhere. That is right for `Handle.loss`, and for
the loss recipe that DeepSpeed and transformers document: an all_gather of the ranks' mean losses, weighted by tokens,
whose backward adds up over the ranks.

Batch sizes stay right through ``sequence_parallel_size`` in the configuration, which ``DeepSpeedConfig`` reads if it
gets no mpu. When the engine is built, `deepspeed.utils.groups` reports the replica's groups.

`names` lists the private names of DeepSpeed. `install` replaces names of its modules; `hook_table` lists the hooks
around methods of an engine.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import deepspeed
import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.zero import partition_parameters

from ds_hetero.common.announce import announce
from ds_hetero.common.text import listed
from ds_hetero.decision.resolve import sp_size_of
from ds_hetero.engine.ds_config import DsConfig, has_active_section, read_training_facts, sets_batch_by_rank
from ds_hetero.engine.monitoring import monitor_steps
from ds_hetero.engine.patching import Function, around
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.trained.model import TrainedModel
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed.batch_sizes import plain_configuration, report_batches_of_replicas
from ds_hetero.frameworks.deepspeed.checks import checks_of_model
from ds_hetero.frameworks.deepspeed.configuration_argument import read_same_configuration
from ds_hetero.frameworks.deepspeed.experts.engine import EngineExperts, move_alike
from ds_hetero.frameworks.deepspeed.experts.optimizer import (
    ExpertOptimizer,
    expect_trained_experts_in_groups,
    inner_maker,
    take_experts_out,
)
from ds_hetero.frameworks.deepspeed.hook_makers import EngineHooks
from ds_hetero.frameworks.deepspeed.hook_table import hooks_of_pipelines, hooks_of_replica
from ds_hetero.frameworks.deepspeed.hooked_engine import HookedEngine
from ds_hetero.frameworks.deepspeed.installer import Installer
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys, unknown_keys
from ds_hetero.frameworks.deepspeed.kind_choice import choose_kind_of_call
from ds_hetero.frameworks.deepspeed.late_registration import note_engine
from ds_hetero.frameworks.deepspeed.losses import scaling_of
from ds_hetero.frameworks.deepspeed.mpu import SequenceMpu, mpu_of_replica, sequence_parallelism_hidden
from ds_hetero.frameworks.deepspeed.names import COLLECTIVES, HANDLES, ZERO_3_IDENTITIES
from ds_hetero.frameworks.deepspeed.pipeline.engine import PipelineInstaller
from ds_hetero.frameworks.deepspeed.protocols import Arguments
from ds_hetero.frameworks.deepspeed.replica_engine import ReplicaEngine
from ds_hetero.frameworks.deepspeed.stock_ulysses import SIZE_OF_CONFIGURATION, StockUlysses, refuse_shards
from ds_hetero.frameworks.deepspeed.zero import optimizers, stage3
from ds_hetero.frameworks.deepspeed.zero.stale_gradients import clear_stale_gradients
from ds_hetero.job.start import World
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.graph_nodes import note_identities
from ds_hetero.runtime.experts.parts import ExpertParts
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_checks import StepChecks
from ds_hetero.runtime.step_clock import IDLE, running_clock
from ds_hetero.values.section import SECTION, expect_section_name


def install(registry: Registry) -> None:
    """Replace `deepspeed.initialize`, stock Ulysses and how ZeRO-3 gathers, and let the clock time collectives."""
    replace = registry.patches.replace
    ulysses = StockUlysses(registry)
    replace(deepspeed, "initialize", around(_initialize, registry, ulysses))
    replace(ulysses_sp.UlyssesSPDataLoaderAdapter, "__init__", around(ulysses.adapt))
    # A class method and a static method: the function inside each is replaced.
    registering = around(ulysses.register)
    replace(
        ulysses_sp.UlyssesSPAttentionHF,
        "register_with_transformers",
        lambda stock: classmethod(registering(stock.__func__)),
    )
    refusing = around(refuse_shards, registry)
    replace(ulysses_sp.TiledFusedLogitsLoss, "forward", lambda stock: staticmethod(refusing(stock.__func__)))
    optimizers.install(registry.patches)
    for name in COLLECTIVES:
        replace(TorchBackend, name, _timed)
    for name in HANDLES:
        replace(getattr(partition_parameters, name), "wait", _timed)


def _initialize(registry: Registry, ulysses: StockUlysses, stock: Function, *args: object, **kwargs: object) -> object:
    """Replace `deepspeed.initialize`: with a section, convert the model and build our engine; else call DeepSpeed's.

    Caller: every rank of the world.
    """
    arguments = dict(inspect.signature(stock).bind(*args, **kwargs).arguments)
    ds_config = read_same_configuration(arguments)
    pending = ulysses.take_pending()
    if ds_config is None or not has_active_section(ds_config):
        expect_section_name(ds_config or {})
        if pending is not None and pending.error is not None:
            raise pending.error
        elastic.refuse_other_engines(f'an engine without a "{SECTION}" section')
        registry.note_unsplit(arguments.get("model"))
        registry.say_stock("deepspeed.initialize was given none")
        return stock(*args, **kwargs)
    if pending is not None:
        pending.cancel()
    unknown = unknown_keys(ds_config)
    if unknown and World.current().rank == 0:
        announce(
            f"ds_config.json has {listed(unknown)}, which no release of DeepSpeed that was tried reads: its effect on "
            "training with unequal ranks is not known"
        )
    try:
        hooked: HookedEngine
        choose_kind_of_call(registry, arguments, ds_config, _sp_sizes_by_source(registry, arguments, ds_config))
        if registry.request_of(ds_config).is_of_pipelines:
            pipelined, initialize_result = PipelineInstaller(registry, stock, arguments, ds_config).install()
            hooked, rows = pipelined, hooks_of_pipelines(pipelined)
        else:
            on_replica, initialize_result = ReplicaInstaller(registry, stock, arguments, ds_config).install()
            hooked, rows = on_replica, hooks_of_replica(on_replica)
        registry.patches.on_undo(EngineHooks(hooked.engine, rows).remove)
        if hooked.elastic is not None:
            hooked.monitor.keep_events(hooked.elastic.events)
    finally:
        registry.forget_request()
    engine, *_ = initialize_result
    note_engine(engine)
    return initialize_result


class ReplicaInstaller(Installer):
    """Builds an engine whose model is split over the sequence, or runs whole on every rank."""

    def install(self) -> tuple[ReplicaEngine, tuple[Any, ...]]:
        """Convert the model, then build the engine on it; see `Installer.install`."""
        model = self._arguments["model"]
        _expect_supported(model, self._ds_config)
        _expect_first_engine(self._registry.find_on_replica(model))
        sizes = _sp_sizes_by_source(self._registry, self._arguments, self._ds_config)
        trained = self._registry.prepare(model, self._ds_config, sizes)
        note_identities(ZERO_3_IDENTITIES)
        if trained.experts is None:
            initialize_result = self._build(trained, sp_size_of(sizes))
            experts = None
        else:
            initialize_result, experts = self._build_beside_experts(trained, trained.experts, sp_size_of(sizes))
        engine, *_ = initialize_result
        clear_stale_gradients(engine)
        report_batches_of_replicas(engine, trained.replica)
        # An engine that is built without sequence parallelism has no such group. Its users expect the replica's.
        engine.seq_parallel_group = trained.replica.sp_group
        trained.prediction_check.start()
        trained.elastic = self._keep_in_memory(engine, trained.start)
        return self._hooked(trained, engine, experts), initialize_result

    def _build_beside_experts(
        self, trained: TrainedModel, parts: ExpertParts, sp_size: int | None
    ) -> tuple[tuple[Any, ...], EngineExperts]:
        """Let DeepSpeed build the engine without experts that are divided among ranks; add an optimizer for these.

        Raises:
            ConfigError: on every rank: the optimizer cannot be made a second time for the experts.
        """
        optimizer, model_parameters = self._arguments.get("optimizer"), self._arguments.get("model_parameters")
        has_optimizer = optimizer is not None or "optimizer" in self._ds_config
        groups: list[tuple[int, list[str]]] = []
        arguments = dict(self._arguments)

        def take_out() -> None:
            if not has_optimizer:
                return
            inner_maker(optimizer, self._ds_config)
            if optimizer is not None:
                _, found = take_experts_out(optimizer.param_groups, parts)
            else:
                given = trained.module.parameters() if model_parameters is None else model_parameters
                arguments["model_parameters"], found = take_experts_out(list(given), parts)
            expect_trained_experts_in_groups(found, parts)
            groups.extend(found)

        on_all_ranks(take_out)
        self._arguments = arguments
        with parts.hidden():
            result = self._build(trained, sp_size)
        engine, *_ = result
        move_alike(engine, parts)
        parts.copy_from_first_replica()
        parts.has_engine = True
        experts = None
        if has_optimizer and parts.trained:
            experts = ExpertOptimizer(engine, parts, inner_maker(optimizer, self._ds_config), groups)
        return result, EngineExperts(engine, parts, experts)

    def _hooked(self, trained: TrainedModel, engine: Any, experts: EngineExperts | None) -> ReplicaEngine:
        """Return the engine with the state of its hooks."""
        hooked = ReplicaEngine(
            engine=engine,
            trained=trained,
            clock=trained.clock,
            monitor=monitor_steps(self._registry, trained, engine.steps_per_print(), engine.monitor),
            prediction_check=trained.prediction_check,
            scaling=scaling_of(trained),
            stage3=optimizers.stage3_checkpoints(engine),
            elastic=trained.elastic,
            experts=experts,
        )
        if trained.batches is not None:
            trained.batches.probes.after_run = stage3.make_run_eraser(engine)
        if hooked.elastic is not None:
            hooked.elastic.losses = trained.losses
        if trained.start.section.checks.enabled:
            hooked.checks = StepChecks(checks_of_model(hooked))
        return hooked

    def _batch_configuration(self) -> DsConfig:
        """Return the user's configuration; without "train_batch_size" if the engine has no optimizer.

        A reference model (of DPO, for example) has no optimizer, and gets the configuration of the trained model.
        transformers has replaced its "train_batch_size": "auto" by a number that counts ranks instead of replicas, and
        accelerate corrects this number only for the trained engine.
        """
        has_optimizer = self._arguments.get("optimizer") is not None or "optimizer" in self._ds_config
        if has_optimizer or self._ds_config.get("train_micro_batch_size_per_gpu") is None:
            return self._ds_config
        return {key: value for key, value in self._ds_config.items() if key != "train_batch_size"}

    @waiting_for_peers("building the engine")
    def _build(self, trained: TrainedModel, sp_size: int | None) -> tuple[Any, ...]:
        """Let DeepSpeed build the engine without sequence parallelism, and with our ZeRO optimizers."""
        replica = trained.replica
        config = plain_configuration(self._batch_configuration(), replica, sp_size)
        weights, nodes = optimizers.agree_on_owners(
            trained.start, self._ds_config, trained.module, self._arguments.get("optimizer")
        )
        if trained.start.facts.training.zero_stage == 3 and trained.experts is None:
            stage3.gather_experts_at_once(self._registry.adapters.models.containers_of_experts(trained.module))
        replica_state = mpu_of_replica(replica, sp_size)
        # The docstring of this module says why DeepSpeed must see no sequence parallelism here.
        with (
            sequence_parallelism_hidden(replica_state, self._registry.patches),
            optimizers.optimizers_in_place(config, weights, nodes, has_experts=trained.experts is not None),
        ):
            return self._call_stock(config, mpu=None)


def _sp_sizes_by_source(registry: Registry, arguments: Arguments, ds_config: DsConfig) -> dict[str, int | None]:
    """Return the sequence-parallel size in each place where it can be set; None in a place that does not set it."""
    mesh = arguments.get("mesh_param")
    return {
        SIZE_OF_CONFIGURATION: read_training_facts(ds_config).sp_size,
        "mesh_param of deepspeed.initialize": mesh[1] if mesh else None,
        "the mpu given to deepspeed.initialize": _size_of_mpu(arguments.get("mpu")),
        "sp_size of accelerate's ParallelismConfig": registry.adapters.processes.size_of_accelerate(),
        f'"{SECTION}.batch", which splits no sequence,': 1 if sets_batch_by_rank(ds_config) else None,
    }


def _size_of_mpu(mpu: Any) -> int | None:
    """Return the sequence-parallel size of an mpu; None if it has none."""
    if isinstance(mpu, SequenceMpu):
        return mpu.user_sp_size
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        size: int = mpu.get_sequence_parallel_world_size()
        return size
    return None


def _expect_supported(model: object, ds_config: DsConfig) -> None:
    """Check that the model is not a ``PipelineModule``, and that all keys are supported. Raises `HeteroError`."""
    if isinstance(model, deepspeed.PipelineModule):
        raise ModelError("a PipelineModule cannot be split over the sequence. Give deepspeed.initialize a plain model.")
    expect_supported_keys(ds_config)


def _expect_first_engine(prepared: TrainedModel | None) -> None:
    """Check that a model with divided experts gets one engine, and how it gets it. Raises `ConfigError` on every rank.

    The Trainer prepares a model before it builds the engine; its saves under ZeRO-3 do not ask for experts.
    """
    if prepared is None or prepared.experts is None:
        return
    if prepared.start.facts.training.zero_stage == 3 and not prepared.experts.has_engine:
        raise ConfigError(
            f'"{SECTION}.experts" on ZeRO-3 is tried in a loop of your own alone, not where a model is prepared before '
            "deepspeed.initialize, as under the Trainer. Set ZeRO stage 0, 1 or 2, or leave the key out."
        )
    if prepared.experts.has_engine:
        raise ConfigError(
            f'"{SECTION}.experts" gives the experts of a model one engine, but this model has had one already, as '
            "after a second deepspeed.initialize or with auto_find_batch_size of the Trainer. Load the model again, "
            "and call deepspeed.initialize once."
        )


def _timed(stock: Function) -> Function:
    """Return a function that calls ``stock`` and records its duration as idle time in the running engine's clock."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(stock)
    def timed(*args: object, **kwargs: object) -> object:
        with running_clock().phase(IDLE, stock.__name__):
            return stock(*args, **kwargs)

    wrapped: Function = timed
    return wrapped
