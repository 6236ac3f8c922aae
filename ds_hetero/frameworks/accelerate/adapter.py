"""accelerate: the same batch for all ranks of a replica, and schedules that count replicas, not ranks.

Replicas that take different batches are, to the user, one worker on all ranks (``sp_size`` is the world size): the
global batch is that of one process, and how it is dealt out is the schedule's business.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import accelerate.accelerator
import accelerate.data_loader
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DeepSpeedSequenceParallelConfig,
    DistributedType,
    DummyScheduler,
    ParallelismConfig,
    gather_object,
    recursively_apply,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ds_hetero.engine.ds_config import enabled, read_training_facts, says_batches, size_of_configuration
from ds_hetero.engine.loader import WholeLoader
from ds_hetero.engine.loader_by_mode import LoaderByMode
from ds_hetero.engine.model_calls import calls_of
from ds_hetero.engine.patching import Function, Patches, around
from ds_hetero.engine.process import agree_on_configuration
from ds_hetero.engine.read_marks import reads_shards
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.data.loader import ShardedLoader
from ds_hetero.runtime.data.sampling import replica_samples
from ds_hetero.runtime.pipeline.batches import SameBatches

_sharding: ContextVar[_Sharding | None] = ContextVar("_sharding", default=None)
_latest: weakref.ref[Accelerator] | None = None  # that has prepared a model for this engine
_made_after_registration: weakref.WeakSet[Accelerator] = weakref.WeakSet()
_replica_size: ContextVar[int] = ContextVar("_replica_size", default=1)  # ranks of which numbers are gathered once


@dataclass(frozen=True)
class _Sharding:
    """Kind of batches that loaders prepared now yield."""

    sp_size: int  # ranks that share a batch
    batches: ReplicaBatches | None  # where the replicas take different batches
    by_mode: bool = False  # loaders are of training and of evaluation, which shows when they are read
    evaluates: bool = False  # they are of evaluation alone: no random state is set for their order


def install(registry: Registry) -> None:
    """Replace what has to know the difference between ranks and replicas."""
    replace = registry.patches.replace
    replace(accelerate.Accelerator, "__init__", around(_count_processes))
    replace(accelerate.Accelerator, "_prepare_deepspeed", around(_prepare, registry))
    replace(accelerate.Accelerator, "prepare", around(_say_whether_shared, registry))
    replace(AcceleratedScheduler, "step", around(_step))
    replace(accelerate.Accelerator, "gather_for_metrics", around(_gather_for_metrics))
    replace(accelerate.accelerator, "gather_object", gathered_from_replicas)
    replace(accelerate.accelerator, "prepare_data_loader", around(_prepare_data_loader))
    for module in (accelerate, accelerate.accelerator, accelerate.data_loader):
        replace(module, "skip_first_batches", skip_first_batches)
    _replace_wherever_imported(registry.patches, accelerate.data_loader, "skip_first_batches", skip_first_batches)


def asks_for_engine(accelerator: Accelerator) -> bool:
    """Whether an Accelerator was made with DeepSpeed and a configuration that asks for this engine."""
    plugin = accelerator.state.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    return plugin is not None and enabled(plugin.deepspeed_config)


def objects_of_script() -> dict[str, Any]:
    """Return all that the latest Accelerator would write into a checkpoint beside the engine, by name."""
    accelerator = None if _latest is None else _latest()
    if accelerator is None:
        return {}
    kinds = {"scheduler": accelerator._schedulers, "object": accelerator._custom_objects}
    return {f"accelerate.{kind}{i}": one for kind, objects in kinds.items() for i, one in enumerate(objects)}


@contextlib.contextmanager
def loaders_over_replicas(
    sp_size: int, batches: ReplicaBatches | None, *, by_mode: bool = False, evaluates: bool = False
) -> Iterator[None]:
    """Let loaders that are prepared inside shard over replicas of ``sp_size`` ranks, not over ranks.

    Args:
        sp_size: ranks that share a batch.
        batches: of replicas that take different batches; see `ds_hetero.job.start.Request.batches_of`.
        by_mode: see `_Sharding`.
        evaluates: likewise.
    """
    token = _sharding.set(_Sharding(sp_size, batches, by_mode, evaluates))
    try:
        yield
    finally:
        _sharding.reset(token)


@contextlib.contextmanager
def gathering_over_replicas(accelerator: Accelerator) -> Iterator[None]:
    """Let an Accelerator gather and reduce one value of each replica inside, whose ranks hold the same."""
    token = _replica_size.set(accelerator.parallelism_config.sp_size)
    gather = gathered_from_replicas(accelerator.gather)
    accelerator.gather = gather
    accelerator.reduce = functools.partial(_reduce, gather)
    accelerator.pad_across_processes = around(_count_all)(accelerator.pad_across_processes)
    try:
        yield
    finally:
        del accelerator.gather, accelerator.reduce, accelerator.pad_across_processes
        _replica_size.reset(token)


def _gather_from_replicas(stock: Function, values: Any) -> object:
    """``gather`` or ``gather_object`` of accelerate; of replicas' first ranks inside `gathering_over_replicas`."""
    replica_size = _replica_size.get()
    if replica_size == 1:
        return stock(values)
    if stock.__name__ == "gather_object":
        by_rank = _count_all(stock, [values])
        return [entry for of_rank in by_rank[::replica_size] for entry in of_rank]

    def first_of_replica(gathered: Tensor) -> Tensor:
        by_rank = gathered.reshape(dist.get_world_size(), -1, *gathered.shape[1:])
        return by_rank[::replica_size].flatten(0, 1)

    return recursively_apply(first_of_replica, _count_all(stock, values))


gathered_from_replicas = around(_gather_from_replicas)


def _gather_for_metrics(
    stock: Function, accelerator: Accelerator, input_data: Any, use_gather_object: bool = False
) -> object:
    """Each row once, the last, short batch too: the ranks of a replica hold the same rows, or parts of each.

    Stock counts ranks that all hold rows of their own, and cuts off what is too much of the last batch, also where
    ranks gather numbers and not rows. On shards every rank has something to say of the batch, and nothing is cut off.
    """
    shards = reads_shards(accelerator.gradient_state.active_dataloader)
    size = accelerator.parallelism_config.sp_size if accelerator.parallelism_config is not None else 1
    if shards is None or size == 1 or not asks_for_engine(accelerator):
        return stock(accelerator, input_data, use_gather_object)
    if not shards:
        is_gathering = _replica_size.get() > 1
        with contextlib.nullcontext() if is_gathering else gathering_over_replicas(accelerator):
            return stock(accelerator, input_data, use_gather_object)
    if use_gather_object or not _is_of_tensors(input_data):
        return gather_object(input_data)
    return accelerator.gather(input_data)


def _is_of_tensors(data: object) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


_REDUCTIONS: dict[str, Any] = {
    "sum": Tensor.sum,
    "none": Tensor.sum,
    "mean": Tensor.mean,
    "max": Tensor.amax,
}  # none: as accelerate


def _reduce(gather: Any, values: Any, reduction: str = "mean", scale: float = 1.0) -> object:
    return recursively_apply(lambda value: _REDUCTIONS[reduction](gather(value[None]), dim=0), values)


def _count_all(stock: Function, *args: object, **kwargs: object) -> Any:
    """Call a function of the process group, whatever `one_process_per_replica` has made of it."""
    with _counting(dist.get_world_size()):
        return stock(*args, **kwargs)


@contextlib.contextmanager
def one_process_per_replica() -> Iterator[None]:
    """Let accelerate see no sequence parallelism inside, and replicas as its processes."""
    state = AcceleratorState()
    parallelism, index = state.parallelism_config, state.process_index
    _set_state(parallelism_config=None, process_index=index // parallelism.sp_size)
    try:
        with _counting(state.num_processes // parallelism.sp_size):
            yield
    finally:
        _set_state(parallelism_config=parallelism, process_index=index)


@contextlib.contextmanager
def _counting(num_processes: int) -> Iterator[None]:
    before = AcceleratorState().num_processes
    _set_state(num_processes=num_processes)
    try:
        yield
    finally:
        _set_state(num_processes=before)


def _skip_first_batches(stock: Function, dataloader: Any, num_batches: int = 0) -> object:
    """Of a sharded loader, steps are skipped and not the wrapped loader's batches."""
    if isinstance(dataloader, ShardedLoader | WholeLoader | LoaderByMode | SameBatches):
        return dataloader.skipping(num_batches, stock)
    return stock(dataloader, num_batches)


skip_first_batches = around(_skip_first_batches)


def _replace_wherever_imported(patches: Patches, module: ModuleType, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function for those, too, who imported it by its name before: its code is exchanged, not its name."""
    function: FunctionType = inspect.unwrap(vars(module)[name])  # also where the name is replaced
    code, replacement = function.__code__, f"_ds_hetero_{name}"
    stock = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)

    source = f"def {name}(*args, **kwargs):\n    return {replacement}(*args, **kwargs)\n"
    made: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), {}, made)
    patches.add(module, replacement, make(stock))
    function.__code__ = made[name].__code__
    patches.on_undo(lambda: setattr(function, "__code__", code))


def _count_processes(stock: Function, accelerator: Accelerator, *args: object, **kwargs: object) -> None:
    """Where there is no GPU, accelerate takes every rank of a DeepSpeed job for the only process; count them."""
    stock(accelerator, *args, **_with_parallelism(kwargs))
    _made_after_registration.add(accelerator)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        agree_on_configuration(accelerator.state.deepspeed_plugin.deepspeed_config)
    if asks_for_engine(accelerator) and accelerator.state.backend is None and dist.is_initialized():
        _set_state(
            backend=dist.get_backend(),
            num_processes=dist.get_world_size(),
            process_index=dist.get_rank(),
            local_process_index=dist.get_node_local_rank(fallback_rank=dist.get_rank()),
        )


def _with_parallelism(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an Accelerator, with a ParallelismConfig if the script and its environment give none."""
    plugin = arguments.get("deepspeed_plugin")
    given = arguments.get("parallelism_config") is not None or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")
    sp_size = None if given or plugin is None else size_of_configuration(plugin.deepspeed_config)
    if sp_size is None:
        return arguments
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallelism = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=sp_size,
        dp_shard_size=int(os.environ["WORLD_SIZE"]) // sp_size,
        sp_handler=handler,
    )
    return {**arguments, "parallelism_config": parallelism}


def size_of_accelerate() -> int | None:
    """The sequence-parallel size that accelerate was given; None where there is none."""
    parallelism = AcceleratorState._shared_state.get("parallelism_config")
    return None if parallelism is None or parallelism.sp_size == 1 else int(parallelism.sp_size)


def _say_whether_shared(
    registry: Registry, stock: Function, accelerator: Accelerator, *objects: object, **kwargs: object
) -> object:
    """Around ``Accelerator.prepare``: say where this engine has no part in the training of several ranks."""
    if any(isinstance(one, nn.Module) for one in objects) and not asks_for_engine(accelerator):
        plugin = accelerator.state.deepspeed_plugin
        where = "the Accelerator has no DeepSpeedPlugin" if plugin is None else "its DeepSpeedPlugin has none"
        registry.say_stock(where, is_alone=accelerator.num_processes == 1)
    return stock(accelerator, *objects, **kwargs)


def _prepare(registry: Registry, stock: Function, accelerator: Accelerator, *args: object) -> object:
    """The configuration is known here, before the model is registered and the loaders are wrapped."""
    if not asks_for_engine(accelerator) or not any(isinstance(obj, nn.Module) for obj in args):
        return stock(accelerator, *args)
    parallelism = accelerator.parallelism_config
    sp_size = parallelism.sp_size if parallelism is not None else 1
    ds_config = accelerator.deepspeed_plugin.deepspeed_config
    by_batches = says_batches(ds_config)
    if by_batches:
        _complete_batch_sizes(ds_config, args)
    elif sp_size == 1 and dist.get_world_size() > 1 and accelerator not in _made_after_registration:
        raise ConfigError(
            "ds_hetero.register() was called after the Accelerator was made (a Trainer makes its own in its __init__, "
            "and so do TRL's trainers), which has counted ranks and read the configuration without it. Call "
            "ds_hetero.register() before the Trainer or the Accelerator is made."
        )
    elif sp_size == 1 and dist.get_world_size() > 1:
        raise ConfigError(_why_not_split(ds_config, parallelism is not None))
    batches = registry.request_of(ds_config).batches_of(dist.get_rank())
    with (
        registry.using(ds_config),
        loaders_over_replicas(sp_size, batches, by_mode=by_batches),
        _steps_of_replicas(args, sp_size),
    ):
        prepared = stock(accelerator, *args)
    if batches is not None:
        accelerator.gradient_accumulation_steps = batches.split.micro_steps
    for loader in prepared if by_batches else ():
        if isinstance(loader, LoaderByMode):
            loader.bind(registry, next(obj for obj in args if isinstance(obj, nn.Module)), accelerator.device)
    global _latest
    _latest = weakref.ref(accelerator)
    if dist.get_world_size() == 1:  # no sequence parallelism, for which accelerate would ask for our loader itself
        prepared = _cutting_for_one_rank(registry, args, prepared, accelerator.device)
    if any(isinstance(obj, nn.Module) and registry.is_pipelined(obj) for obj in args):
        # One worker, on all ranks.
        accelerator.gather = accelerator.gather_for_metrics = lambda values, *args, **kwargs: values
    return prepared


def _cutting_for_one_rank(
    registry: Registry, objects: tuple[object, ...], prepared: Iterable[Any], device: torch.device
) -> tuple[object, ...]:
    """Objects as they were prepared, with our loader around those whose model is split over one rank."""
    model = next(obj for obj in objects if isinstance(obj, nn.Module))
    if registry.find_split(model) is None:
        return tuple(prepared)
    calls = calls_of(registry, model)
    return tuple(
        calls.dataloader(made, device, None) if isinstance(given, DataLoader) else made
        for given, made in zip(objects, prepared, strict=True)
    )


def _complete_batch_sizes(ds_config: dict[str, Any], objects: tuple[object, ...]) -> None:
    """Write the batch size of the loaders into the configuration, where that leaves it to them."""
    if ds_config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        sizes = [obj.batch_size for obj in objects if isinstance(obj, DataLoader) and obj.batch_size is not None]
        if sizes:
            ds_config["train_micro_batch_size_per_gpu"] = min(sizes)


def _why_not_split(ds_config: Any, has_parallelism: bool) -> str:
    """Why nothing is split under a sequence-parallel size of 1, given by a ParallelismConfig or not, and what to do."""
    sized_by = '"sequence_parallel_size"' if read_training_facts(ds_config).sp_size == 1 else None
    if sized_by is None and has_parallelism:
        sized_by = "sp_size of the ParallelismConfig"
    if sized_by is None:
        return (
            'the "heterogeneity" section splits sequences over ranks, but accelerate does not split them. Give it '
            'ParallelismConfig(sp_backend="deepspeed", sp_size=N), with N the ranks that share a sequence; or give '
            'every rank a batch of its own: "heterogeneity": {"batch": [6, 2]}.'
        )
    return (
        f"{sized_by} is 1, which makes every rank a replica. Under accelerate and the HF Trainer such replicas take "
        'batches by "heterogeneity": {"batch": [6, 2]}, the samples of every rank, or "by_speed". Or let N > 1 ranks '
        'share a sequence: leave the size out, or give ParallelismConfig(sp_backend="deepspeed", sp_size=N).'
    )


@contextlib.contextmanager
def _steps_of_replicas(objects: tuple[Any, ...], sp_size: int) -> Iterator[None]:
    """Accelerate divides the steps of a DummyScheduler by its processes; the number of replicas is meant."""
    schedulers = [s for s in objects if isinstance(s, DummyScheduler) and s.total_num_steps is not None]
    for scheduler in schedulers:
        scheduler.total_num_steps *= sp_size
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.total_num_steps //= sp_size


def _prepare_data_loader(stock: Function, dataloader: Any, *args: object, **kwargs: object) -> object:
    sharding = _sharding.get()
    if sharding is None:
        return stock(dataloader, *args, **kwargs)
    batches = sharding.batches
    if sharding.by_mode and batches is not None:
        return LoaderByMode(stock(dataloader, *args, **kwargs), dataloader)
    num_replicas, replica = dist.get_world_size() // sharding.sp_size, dist.get_rank() // sharding.sp_size
    if batches is not None:
        dataloader = replica_samples(dataloader, batches.split, batches.replica_id, is_of_rank=sharding.sp_size == 1)
        num_replicas, replica = 1, 0  # nothing is left to shard
    kwargs.update(num_processes=num_replicas, process_index=replica)
    if kwargs.get("dispatch_batches"):
        raise ConfigError(
            "dispatch_batches=True (of accelerator_config, or of DataLoaderConfiguration) lets rank 0 read all batches "
            "and deal them out to ranks, which share each sequence here. Leave dispatch_batches out, or set it to "
            "False: every rank reads the same batches, and keeps its part."
        )
    if isinstance(dataloader.dataset, IterableDataset) and kwargs.get("dispatch_batches") is None:
        kwargs["dispatch_batches"] = False  # a dispatcher deals batches out to ranks
    if num_replicas == 1 and not sharding.evaluates:
        kwargs["rng_types"] = ["torch"]  # shuffling draws from it; with several replicas accelerate sees to that
    prepared = stock(dataloader, *args, **kwargs)
    if batches is not None:
        # Read ahead by an optimizer step, it would tell accelerate too early that the epoch ends; every optimizer
        # step has the same number of micro-batches, so that counting them is enough.
        prepared.begin = prepared.end = _do_nothing
    return prepared


def _do_nothing() -> None:
    pass


def _step(stock: Function, scheduler: Any, *args: object, **kwargs: object) -> None:
    """A step of the optimizer uses one batch per worker, so that many steps of the schedule."""
    state = AcceleratorState()
    if state.distributed_type != DistributedType.DEEPSPEED or not enabled(state.deepspeed_plugin.deepspeed_config):
        stock(scheduler, *args, **kwargs)
        return
    parallelism = state.parallelism_config
    with _counting(state.num_processes // (parallelism.sp_size if parallelism is not None else 1)):
        stock(scheduler, *args, **kwargs)


def _set_state(**values: Any) -> None:
    """Set attributes of accelerate's process-wide state, which it keeps twice."""
    PartialState._shared_state.update(values)
    AcceleratorState._shared_state.update(values)
