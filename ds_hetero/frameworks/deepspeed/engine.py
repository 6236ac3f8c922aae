"""DeepSpeed: the engine is built as if there were no sequence parallelism, then DeepSpeed's groups are the replica's.

DeepSpeed divides gradients by world size over sequence-parallel size on most paths and by the plain world size on
others (ZeRO-3 with reduce_scatter). Shown no sequence parallelism while an engine is built, it divides by the plain
world size on all of them, which is right for the loss recipe that DeepSpeed and transformers document (an all_gather
of the ranks' mean losses, weighted by tokens, whose backward adds up over the ranks) and for `Handle.loss`. Batch
sizes are kept right by ``sequence_parallel_size`` in the configuration, which ``DeepSpeedConfig`` reads where it is
given no mpu. Afterwards `deepspeed.utils.groups` answers for the replica.

`names` lists the names of DeepSpeed that are not documented. `install` replaces names of its modules; `hooks` wraps the
methods of an engine that has been built, by the rows of `hook_table`.
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
from ds_hetero.decision.decide import sp_size_of
from ds_hetero.engine.ds_config import DsConfig, enabled, read_training_facts, says_batches
from ds_hetero.engine.patching import Function, around
from ds_hetero.engine.registry import PreparedModel, Registry
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed.batch_sizes import plain_configuration, report_batches_of_replicas
from ds_hetero.frameworks.deepspeed.checks import checks_of_model
from ds_hetero.frameworks.deepspeed.given_configuration import agreed_configuration
from ds_hetero.frameworks.deepspeed.hook_table import HOOKS
from ds_hetero.frameworks.deepspeed.hooks import SplitEngine
from ds_hetero.frameworks.deepspeed.installer import EngineHooks, HookedEngine, Installer
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys, unknown_keys
from ds_hetero.frameworks.deepspeed.late_registration import note_engine
from ds_hetero.frameworks.deepspeed.mpu import SequenceMpu, mpu_of_replica, sequence_parallelism_hidden
from ds_hetero.frameworks.deepspeed.names import COLLECTIVES, HANDLES, ZERO_3_IDENTITIES
from ds_hetero.frameworks.deepspeed.pipeline.engine import PipelineInstaller
from ds_hetero.frameworks.deepspeed.stock_ulysses import SIZE_OF_CONFIGURATION, StockUlysses, refuse_shards
from ds_hetero.frameworks.deepspeed.zero import optimizers, stage3
from ds_hetero.frameworks.deepspeed.zero.stale_gradients import clear_stale_gradients
from ds_hetero.job.start import World
from ds_hetero.runtime.data.loss_graph import note_identities
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_checks import StepChecks
from ds_hetero.runtime.step_clock import IDLE, running_clock
from ds_hetero.values.section import SECTION, expect_section_name


def install(registry: Registry) -> None:
    """Replace stock Ulysses, `deepspeed.initialize` and how ZeRO-3 gathers; time collectives."""
    replace = registry.patches.replace
    ulysses = StockUlysses(registry)
    replace(deepspeed, "initialize", around(_initialize, registry, ulysses))
    replace(ulysses_sp.UlyssesSPDataLoaderAdapter, "__init__", around(ulysses.adapt))
    # A class method and a static method: what is replaced is the function inside of each.
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
    """Replace `deepspeed.initialize`: with a section, convert the model and build the engine on it; else call stock.

    Caller: every rank of the world.
    """
    given = dict(inspect.signature(stock).bind(*args, **kwargs).arguments)
    ds_config = agreed_configuration(given)
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
    unknown = unknown_keys(ds_config)
    if unknown and World.current().rank == 0:
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
    """Installs an engine whose model is split over the sequence, or runs whole on every rank."""

    def install(self) -> tuple[HookedEngine, tuple[Any, ...]]:
        """Convert the model, then build the engine on it; see `Installer.install`."""
        model = self._given["model"]
        _expect_supported(model, self._ds_config)
        sizes = self._sp_sizes_by_source()
        prepared = self._registry.prepare(model, self._ds_config, sizes)
        note_identities(ZERO_3_IDENTITIES)
        built = self._build(prepared, sp_size_of(sizes))
        engine = built[0]
        clear_stale_gradients(engine)
        report_batches_of_replicas(engine, prepared.model.replica)
        # Built without sequence parallelism, the engine has no such group; users of it ask for the replica's.
        engine.seq_parallel_group = prepared.model.replica.sp_group
        prepared.prediction_check.start()
        prepared.elastic = self._keep_in_memory(engine, prepared.start)
        return self._hooked(prepared, engine), built

    def _sp_sizes_by_source(self) -> dict[str, int | None]:
        """Return the sequence-parallel size by each place that may say it; None where it does not."""
        mesh = self._given.get("mesh_param")
        return {
            SIZE_OF_CONFIGURATION: read_training_facts(self._ds_config).sp_size,
            "mesh_param of deepspeed.initialize": mesh[1] if mesh else None,
            "the mpu given to deepspeed.initialize": _size_of_mpu(self._given.get("mpu")),
            "sp_size of accelerate's ParallelismConfig": self._registry.adapters.processes.size_of_accelerate(),
            f'"{SECTION}.batch", which splits no sequence,': 1 if says_batches(self._ds_config) else None,
        }

    def _hooked(self, prepared: PreparedModel, engine: Any) -> SplitEngine:
        """Return the engine with what the hooks around its methods need."""
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
        return hooked

    def _batch_configuration(self) -> DsConfig:
        """Return the configuration, without a global batch where the engine trains nothing.

        A reference model gets the configuration of the trained model. There transformers has filled in
        "train_batch_size": "auto" by counting ranks, and accelerate corrects that for the trained engine only.
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
        # Why stock sees no sequence parallelism here: see the module.
        with (
            sequence_parallelism_hidden(replica_state, self._registry.patches),
            optimizers.optimizers_in_place(config, weights, nodes),
        ):
            return self._call_stock(config, mpu=None)


def _size_of_mpu(mpu: Any) -> int | None:
    """Return the sequence-parallel size that an mpu says; None where it says none."""
    if isinstance(mpu, SequenceMpu):
        return mpu.size_given
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        size: int = mpu.get_sequence_parallel_world_size()
        return size
    return None


def _expect_supported(model: object, ds_config: DsConfig) -> None:
    """Refuse DeepSpeed's own pipelines, and keys that this engine cannot honour. Raises `HeteroError`."""
    if isinstance(model, deepspeed.PipelineModule):
        raise ModelError("a PipelineModule cannot be split over the sequence; give deepspeed.initialize a plain model.")
    expect_supported_keys(ds_config)


def _timed(stock: Function) -> Function:
    """Let the clock of the running engine see how long a collective keeps this rank."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(stock)
    def timed(*args: object, **kwargs: object) -> object:
        with running_clock().phase(IDLE, stock.__name__):
            return stock(*args, **kwargs)

    wrapped: Function = timed
    return wrapped
