"""One call of `deepspeed.initialize` with a section: what is alike whether a model is split or cut into stages.

DeepSpeed is given batch sizes, and an mpu, of an engine without sequence parallelism. What the finished engine reports,
and what `deepspeed.utils.groups` answers, is the replica's.

A hook is a function ``hook(hooked, method, *args, **kwargs)`` that is called in the place of an engine's method. It
calls ``method``, which is the next hook or the engine's own, and returns what the caller of the engine gets. No other
file replaces methods of an engine; `engine.HOOKS` lists the hooks.

An mpu is what DeepSpeed asks, and `deepspeed.utils.groups` where it has one, for process groups by kind of parallelism.

Engines that `ds_hetero.register` came too late for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed import DeepSpeedEngine, load_ds_config
from deepspeed.utils import groups
from torch import nn
from torch.distributed import ProcessGroup

from ds_hetero.decision.decide import JobStart
from ds_hetero.engine.adapters import ElasticState
from ds_hetero.engine.ds_config import DsConfig, enabled, says_batches
from ds_hetero.engine.patching import Function, Patches, around
from ds_hetero.engine.process import is_elastic
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed.protocols import Arguments, Engine, State
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.runtime.peers.board import default_group
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks import StepChecks
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.plans import BatchSplit
from ds_hetero.values.section import SECTION

Hook = Function


@dataclass(kw_only=True)
class HookedEngine:
    """An engine and what the hooks around its methods need."""

    engine: Engine  # DeepSpeed's, as it was built
    clock: StepClock
    monitor: StepMonitor  # takes the times of steps
    elastic: ElasticState | None = None  # keeps its state in memory; None in a job that is not elastic
    checks: StepChecks | None = None  # of every optimizer step; None where the section switches them off

    @property
    def why_batch_is_fixed(self) -> str | None:
        """Message for who changes the batch size of the engine; None where it can be changed."""
        return None


class HookRow(NamedTuple):
    """A row of the table of hooks."""

    method: str
    hook: Hook
    of: type[HookedEngine] = HookedEngine  # the engines that have it
    part: str = ""  # of `HookedEngine`, which the hook is given in its place; where it is None, there is no hook


class EngineHooks:
    """Hooks around the methods of one engine; the ``table`` has those of one method outermost first."""

    def __init__(self, hooked: HookedEngine, table: Sequence[HookRow]) -> None:
        self._engine, self._names = weakref.ref(hooked.engine), {row.method for row in table}
        for row in reversed(table):
            if isinstance(hooked, row.of) and (part := getattr(hooked, row.part) if row.part else hooked) is not None:
                setattr(hooked.engine, row.method, around(row.hook, part)(getattr(hooked.engine, row.method)))

    def take_off(self) -> None:
        """Leave the engine, if it still exists, with its own methods."""
        if (engine := self._engine()) is not None:
            for name in self._names & vars(engine).keys():
                delattr(engine, name)


class Installer:
    """One call of `deepspeed.initialize` with a section; subclasses `install` what it asks for."""

    def __init__(self, registry: Registry, stock: Function, given: Arguments, ds_config: DsConfig) -> None:
        self._registry, self._stock, self._given, self._ds_config = registry, stock, given, ds_config

    def _call_stock(self, config: DsConfig, **changed: Any) -> tuple[Any, ...]:
        """Let stock build the engine, with ``config`` and ``changed`` arguments in the place of the user's."""
        args: Any = self._given.get("args")
        if getattr(args, "deepspeed_config", None) is not None:  # of the command line
            args = copy.copy(args)
            args.deepspeed_config = None
        ours = {"args": args, "config": config, "config_params": None, "mesh_param": None}
        try:
            built: tuple[Any, ...] = self._stock(**{**self._given, **ours, **changed})
        except RuntimeError as error:
            _name_scalars(self._given["model"], error)
            raise
        return built

    def _keep_in_memory(
        self, engine: Engine, start: JobStart, stages: list[elastic.Described] | None = None
    ) -> ElasticState | None:
        """Make an engine elastic if its job is; see `elastic.prepare`."""
        return elastic.prepare(engine, start, stages) if is_elastic() or start.section.elastic is not None else None

    def install(self) -> tuple[HookedEngine, tuple[Any, ...]]:
        """Let stock build an engine of our parts. Raises `HeteroError` on every rank, where that is impossible.

        Returns:
            The engine with what the hooks around its methods need; and what stock returns.

        Caller: every rank of the world.
        """
        raise NotImplementedError


def _name_scalars(model: nn.Module, error: RuntimeError) -> None:
    """Refuse parameters without a dimension, where DeepSpeed fails at them. Raises `ModelError`.

    DeepSpeedEngine._broadcast_model of 0.19.8 sends ``p.data.view(torch.uint8)``, which torch cannot make of them.
    """
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars and "dim() cannot be 0" in str(error):
        raise ModelError(
            f"DeepSpeed cannot send a parameter without a dimension to the ranks when it builds an engine, and "
            f"{type(model).__name__} has {', '.join(scalars[:3])}. Give it the shape (1,)."
        ) from error


BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def plain_configuration(ds_config: DsConfig, replica: Replica, sp_size: int | None) -> State:
    """Make a configuration without sequence parallelism. Raises `ConfigError`: another global batch.

    Batch sizes that follow from the others are filled in, since DeepSpeed would compute them as fractions. Replicas
    that take different batches are, to DeepSpeed, one that takes batches of one sample; `report_batches_of_replicas`
    corrects that in the finished engine.

    Args:
        sp_size: the sequence-parallel size that the user gave, if any.
    """
    config = {key: value for key, value in ds_config.items() if key != "data_parallel_size"}
    total, micro, steps = (config.get(name) for name in BATCH_SIZES)
    split, num_replicas = replica.batch_split, replica.num_replicas
    if split is not None:
        if not says_batches(ds_config):  # which were compared when they became a plan
            expect_batch_of_replicas(ds_config, split, dist.get_world_size(), sp_size)
        num_replicas, total, micro, steps = 1, split.micro_steps, 1, split.micro_steps
    config["sequence_parallel_size"] = dist.get_world_size() / num_replicas
    if micro is None and total is not None:
        micro = total // ((steps or 1) * num_replicas)
    if steps is None and micro:
        steps = total // (micro * num_replicas) if total is not None else 1
    if total is None and micro and steps:
        total = micro * steps * num_replicas
    config.update({name: n for name, n in zip(BATCH_SIZES, (total, micro, steps), strict=True) if n is not None})
    return config


def expect_batch_of_replicas(ds_config: DsConfig, split: BatchSplit, world_size: int, sp_size: int | None) -> None:
    """Refuse a configuration whose global batch is not that of the replicas. Raises `ConfigError`."""
    total, micro, steps = (ds_config.get(name) for name in BATCH_SIZES)
    samples_by_setting = {"train_batch_size": total}
    if micro is not None:
        workers = world_size // (sp_size or world_size)
        product = f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps or 1} x {workers}"
        samples_by_setting[product] = micro * (steps or 1) * workers
    for setting, samples in samples_by_setting.items():
        if samples is not None and samples != split.samples:
            raise ConfigError(
                f"the replicas of the schedule take {split} per optimizer step, but {setting} is {samples}. "
                f"Make the global batch {split.samples}, leave it out where that is possible, or change the replicas' "
                "micro_batch_size and micro_batches."
            )


def report_batches_of_replicas(engine: Engine, replica: Replica) -> None:
    """Let a finished engine count replicas, and the samples of all of them, in its reports."""
    engine.dp_world_size = replica.num_replicas  # for set_train_batch_size; ZeRO's world is seq_dp_world_size
    split = replica.batch_split
    if split is not None:
        engine._config.train_batch_size = engine.tput_timer.batch_size = split.samples
        engine._config.train_micro_batch_size_per_gpu = split.micro_batch_sizes[replica.replica_id]


class Mpu:
    """Answers ``get_KIND_parallel_group``, ``get_KIND_parallel_world_size`` and ``get_KIND_parallel_rank``.

    Args:
        groups: of this rank, by kind: ``"data"``, ``"model"``, ``"sequence"``.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        for kind, group in groups.items():
            answers = {"group": group, "world_size": dist.get_world_size(group), "rank": dist.get_rank(group)}
            for what, answer in answers.items():
                setattr(self, f"get_{kind}_parallel_{what}", functools.partial(_the, answer))


def _the(answer: object) -> object:
    return answer


class SequenceMpu(Mpu):
    """An mpu with sequence parallelism; see `Mpu`.

    Args:
        size_given: the sequence-parallel size that the user gave, if any: the number of all ranks where replicas have
            different sizes.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup], size_given: int | None = None) -> None:
        super().__init__(groups)
        self.size_given = size_given

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Raise `ConfigError`: groups exist. Its name marks, as in DeepSpeed, an mpu without model parallelism."""
        raise ConfigError("the sequence-parallel groups are made by ds_hetero; do not initialize them again.")


def mpu_of_replica(replica: Replica, size_given: int | None) -> SequenceMpu:
    """Sequence parallelism over this rank's replica; ZeRO partitions over all ranks."""
    return SequenceMpu({"sequence": replica.sp_group, "sequence_data": default_group()}, size_given)


def mpu_of_one_worker() -> SequenceMpu:
    """Sequence parallelism over the whole job, which is then one worker."""
    return SequenceMpu({"sequence": default_group()})


def expect_one_worker(size: int) -> None:
    """Refuse another sequence-parallel size than the number of all ranks. Raises `ConfigError`: it names both."""
    if size != dist.get_world_size():
        raise ConfigError(
            f"a plan of pipelines takes all {dist.get_world_size()} ranks as one worker, whose batch is the global "
            f"one, but the sequence-parallel size is {size}. Set sp_size to {dist.get_world_size()}."
        )


@contextlib.contextmanager
def sequence_parallelism_hidden(replica_state: SequenceMpu, patches: Patches) -> Iterator[None]:
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

    patches.on_undo(restore)


_known: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def expect_no_engine() -> None:
    """At registration, refuse engines built before it from a configuration with a section. Raises `ConfigError`."""
    if not dist.is_initialized():
        return  # and so there is none; a look at all objects takes some tenths of a second
    for known in gc.get_objects():
        if isinstance(known, DeepSpeedEngine) and known not in _known and enabled(load_ds_config(known.config)):
            raise ConfigError(
                f'ds_hetero.register() was called after an engine was built from a configuration with a "{SECTION}" '
                "section, which trains whole sequences on every rank now. Call it before deepspeed.initialize, the "
                "Accelerator or trainer.train()."
            )


def note_engine(engine: DeepSpeedEngine) -> None:
    """``engine`` was built while registered."""
    _known.add(engine)
