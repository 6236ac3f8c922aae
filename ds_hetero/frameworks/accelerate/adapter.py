"""Hooks of accelerate: all ranks of a replica read the same batch, and accelerate counts replicas instead of ranks.

    stock accelerate counts ranks in              with this engine
    loaders                                       one batch per replica (`_prepare_data_loader`)
    gather, gather_for_metrics                    one value per replica (`gathering_over_replicas`)
    steps of a scheduler per optimizer step       one per replica (`_step`)
    total steps of a DummyScheduler               divided by replicas (`_steps_of_replicas`)

Replicas that take different batches look like one worker on all ranks to the user: ``sp_size`` is the world size, the
global batch is that of one process, and the schedule decides how it is divided.
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
from ds_hetero.engine.read_marks import reads_shards
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.same_configuration import agree_on_configuration
from ds_hetero.errors import ConfigError
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.data.loader import ShardedLoader
from ds_hetero.runtime.data.sampling import replica_samples
from ds_hetero.runtime.pipeline.batches import SameBatches

_sharding: ContextVar[_Sharding | None] = ContextVar("_sharding", default=None)
_latest: weakref.ref[Accelerator] | None = None  # the latest one that has prepared a model for this engine
_made_after_registration: weakref.WeakSet[Accelerator] = weakref.WeakSet()
_replica_size: ContextVar[int] = ContextVar("_replica_size", default=1)  # ranks that hold the same values


@dataclass(frozen=True)
class _Sharding:
    """Settings of the loaders that are being prepared."""

    sp_size: int  # ranks that share a batch
    batches: ReplicaBatches | None  # of replicas that take different batches; None if all take equal ones
    by_mode: bool = False  # a loader may be for training or for evaluation; the model's mode tells when it is read
    evaluates: bool = False  # for evaluation only, so that no random state is set for their order


def install(registry: Registry) -> None:
    """Replace the functions of accelerate that would take ranks for replicas."""
    replace = registry.patches.replace
    replace(accelerate.Accelerator, "__init__", around(_count_processes))
    replace(accelerate.Accelerator, "_prepare_deepspeed", around(_prepare, registry))
    replace(accelerate.Accelerator, "prepare", around(_say_whether_shared, registry))
    replace(AcceleratedScheduler, "step", around(_step))
    replace(accelerate.Accelerator, "gather_for_metrics", around(_gather_for_metrics))
    replace(accelerate.accelerator, "gather_object", gathered_from_replicas)
    replace(accelerate.accelerator, "prepare_data_loader", around(_prepare_data_loader))
    # Modules that imported it before by name have the function itself, so its code is replaced, too.
    for module in (accelerate, accelerate.accelerator, accelerate.data_loader):
        replace(module, "skip_first_batches", skip_first_batches)
    _replace_wherever_imported(registry.patches, accelerate.data_loader, "skip_first_batches", skip_first_batches)


def asks_for_engine(accelerator: Accelerator) -> bool:
    """Return True if an Accelerator uses DeepSpeed with a configuration that asks for this engine."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return False
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and enabled(plugin.deepspeed_config)


def objects_of_script() -> dict[str, Any]:
    """Return, by name, the objects that the latest Accelerator would save in a checkpoint in addition to the engine."""
    accelerator = None if _latest is None else _latest()
    if accelerator is None:
        return {}
    objects: dict[str, Any] = {}
    for index, scheduler in enumerate(accelerator._schedulers):
        objects[f"accelerate.scheduler{index}"] = scheduler
    for index, custom_object in enumerate(accelerator._custom_objects):
        objects[f"accelerate.object{index}"] = custom_object
    return objects


@contextlib.contextmanager
def loaders_over_replicas(
    sp_size: int, batches: ReplicaBatches | None, *, by_mode: bool = False, evaluates: bool = False
) -> Iterator[None]:
    """Let loaders that are prepared inside divide batches among replicas of ``sp_size`` ranks, not among ranks.

    Args:
        sp_size: ranks that share a batch.
        batches: of replicas that take different batches; see `ds_hetero.job.start.Request.batches_of`.
        by_mode: see `_Sharding`.
        evaluates: see `_Sharding`.
    """
    token = _sharding.set(_Sharding(sp_size, batches, by_mode, evaluates))
    try:
        yield
    finally:
        _sharding.reset(token)


@contextlib.contextmanager
def gathering_over_replicas(accelerator: Accelerator) -> Iterator[None]:
    """Let an Accelerator gather and reduce one value per replica inside, because its ranks hold the same value."""
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
    """Replace accelerate's ``gather`` and ``gather_object``: gather from the first rank of every replica.

    Outside of `gathering_over_replicas`, they gather from all ranks.
    """
    replica_size = _replica_size.get()
    if replica_size == 1:
        return stock(values)
    if stock.__name__ == "gather_object":
        entries_by_rank = _count_all(stock, [values])
        gathered_entries = []
        for entries in entries_by_rank[::replica_size]:
            gathered_entries.extend(entries)
        return gathered_entries

    def first_of_replica(gathered: Tensor) -> Tensor:
        """[ranks * rows, ...] -> [replicas * rows, ...]."""
        by_rank = gathered.reshape(dist.get_world_size(), -1, *gathered.shape[1:])
        return by_rank[::replica_size].flatten(0, 1)

    return recursively_apply(first_of_replica, _count_all(stock, values))


gathered_from_replicas = around(_gather_from_replicas)


def _gather_for_metrics(
    stock: Function, accelerator: Accelerator, input_data: Any, use_gather_object: bool = False
) -> object:
    """Replace ``Accelerator.gather_for_metrics``: return each row once, also of a short last batch.

    ranks of a replica hold       action
    the same whole rows           gather from one rank per replica; stock removes the duplicates of the last batch
    shards of the rows            gather from all ranks, and remove nothing: stock would cut off values of ranks,
                                  because it takes each rank for a holder of other rows
    """
    has_shards = reads_shards(accelerator.gradient_state.active_dataloader)
    sp_size = accelerator.parallelism_config.sp_size if accelerator.parallelism_config is not None else 1
    if has_shards is None or sp_size == 1 or not asks_for_engine(accelerator):
        return stock(accelerator, input_data, use_gather_object)
    if not has_shards:
        is_inside = _replica_size.get() > 1
        with contextlib.nullcontext() if is_inside else gathering_over_replicas(accelerator):
            return stock(accelerator, input_data, use_gather_object)
    if use_gather_object or not _is_of_tensors(input_data):
        return gather_object(input_data)
    return accelerator.gather(input_data)


def _is_of_tensors(data: object) -> bool:
    """Return True for a tensor, or nested lists and dicts of tensors, as `gather_for_metrics` tests it."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


_REDUCTIONS: dict[str, Any] = {
    "sum": Tensor.sum,
    "none": Tensor.sum,  # accelerate's reduce sums before it looks at "none"
    "mean": Tensor.mean,
    "max": Tensor.amax,
}


def _reduce(gather: Any, values: Any, reduction: str = "mean", scale: float = 1.0) -> object:
    """Replace ``Accelerator.reduce``: reduce over replicas. ``scale`` is for XLA only, as in accelerate."""
    return recursively_apply(lambda value: _REDUCTIONS[reduction](gather(value[None]), dim=0), values)


def _count_all(stock: Function, *args: object, **kwargs: object) -> Any:
    """Call a function that counts all ranks, also inside `one_process_per_replica`."""
    with _counting(dist.get_world_size()):
        return stock(*args, **kwargs)


@contextlib.contextmanager
def one_process_per_replica() -> Iterator[None]:
    """Let accelerate see each replica as one process inside, without sequence parallelism."""
    state = AcceleratorState()
    parallelism = state.parallelism_config
    index = state.process_index
    _set_state(parallelism_config=None, process_index=index // parallelism.sp_size)
    try:
        with _counting(state.num_processes // parallelism.sp_size):
            yield
    finally:
        _set_state(parallelism_config=parallelism, process_index=index)


@contextlib.contextmanager
def _counting(num_processes: int) -> Iterator[None]:
    """Let accelerate see this number of processes inside."""
    former = AcceleratorState().num_processes
    _set_state(num_processes=num_processes)
    try:
        yield
    finally:
        _set_state(num_processes=former)


def _skip_first_batches(stock: Function, dataloader: Any, num_batches: int = 0) -> object:
    """Replace ``skip_first_batches``: loaders of this engine skip by their own count of batches."""
    if isinstance(dataloader, ShardedLoader | WholeLoader | LoaderByMode | SameBatches):
        return dataloader.skipping(num_batches, stock)
    return stock(dataloader, num_batches)


skip_first_batches = around(_skip_first_batches)


def _replace_wherever_imported(patches: Patches, module: ModuleType, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function also for modules that have imported it by name: exchange its code, not its name.

    The function object gets the code ``return _ds_hetero_NAME(*args, **kwargs)``, whose global name is found in the
    function's own module. A second function object with the former code is given to ``make`` as the stock function.
    """
    function: FunctionType = inspect.unwrap(vars(module)[name])  # the name may already be replaced
    former_code = function.__code__
    replacement = f"_ds_hetero_{name}"
    stock = FunctionType(former_code, function.__globals__, name, function.__defaults__, function.__closure__)

    source = f"def {name}(*args, **kwargs):\n    return {replacement}(*args, **kwargs)\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), {}, namespace)
    patches.add(module, replacement, make(stock))
    function.__code__ = namespace[name].__code__
    patches.on_undo(lambda: setattr(function, "__code__", former_code))


def _count_processes(stock: Function, accelerator: Accelerator, *args: object, **kwargs: object) -> None:
    """Extend ``Accelerator.__init__``: add a ParallelismConfig, and count the ranks of a job without GPUs.

    On CPUs, accelerate takes every rank of a DeepSpeed job for the only process (``state.backend`` is None).
    """
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
    """Return the arguments of an Accelerator; with a ParallelismConfig if script and environment have none."""
    if arguments.get("parallelism_config") is not None or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return arguments
    plugin = arguments.get("deepspeed_plugin")
    if plugin is None:
        return arguments
    sp_size = size_of_configuration(plugin.deepspeed_config)
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
    """Return the sequence-parallel size in accelerate's configuration; None without sequence parallelism."""
    parallelism = AcceleratorState._shared_state.get("parallelism_config")
    if parallelism is None or parallelism.sp_size == 1:
        return None
    return int(parallelism.sp_size)


def _say_whether_shared(
    registry: Registry, stock: Function, accelerator: Accelerator, *objects: object, **kwargs: object
) -> object:
    """Extend ``Accelerator.prepare``: log that several ranks train without this engine, and why."""
    has_model = any(isinstance(prepared, nn.Module) for prepared in objects)
    if has_model and not asks_for_engine(accelerator):
        plugin = accelerator.state.deepspeed_plugin
        where = "the Accelerator has no DeepSpeedPlugin" if plugin is None else "its DeepSpeedPlugin has none"
        registry.say_stock(where, is_alone=accelerator.num_processes == 1)
    return stock(accelerator, *objects, **kwargs)


def _prepare(registry: Registry, stock: Function, accelerator: Accelerator, *args: object) -> object:
    """Replace ``Accelerator._prepare_deepspeed``: prepare model and loaders for this engine.

    This is the first place where accelerate has completed the configuration, and the last before it calls
    ``deepspeed.initialize`` and wraps the loaders.
    """
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
            "ds_hetero.register() was called after the Accelerator was made (a Trainer makes one in its __init__, and "
            "so do TRL's trainers), which has counted ranks and read the configuration without ds_hetero. Call "
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
    if by_batches:
        model = next(obj for obj in args if isinstance(obj, nn.Module))
        for loader in prepared:
            if isinstance(loader, LoaderByMode):
                loader.bind(registry, model, accelerator.device)
    global _latest
    _latest = weakref.ref(accelerator)
    # With sequence parallelism, accelerate wraps loaders in DeepSpeed's adapter, which this engine replaces. One rank
    # has none.
    if dist.get_world_size() == 1:
        prepared = _sharding_for_one_rank(registry, args, prepared, accelerator.device)
    if any(isinstance(obj, nn.Module) and registry.is_pipelined(obj) for obj in args):
        # All ranks together are one worker, and have the same values.
        accelerator.gather = accelerator.gather_for_metrics = lambda values, *args, **kwargs: values
    return prepared


def _sharding_for_one_rank(
    registry: Registry, objects: tuple[object, ...], prepared: Iterable[Any], device: torch.device
) -> tuple[object, ...]:
    """Return the prepared objects, with loaders wrapped in this engine's if the model is sharded over one rank."""
    model = next(obj for obj in objects if isinstance(obj, nn.Module))
    if registry.find_split(model) is None:
        return tuple(prepared)
    calls = calls_of(registry, model)
    wrapped: list[object] = []
    for original, prepared_object in zip(objects, prepared, strict=True):
        if isinstance(original, DataLoader):
            wrapped.append(calls.dataloader(prepared_object, device, None))
        else:
            wrapped.append(prepared_object)
    return tuple(wrapped)


def _complete_batch_sizes(ds_config: dict[str, Any], objects: tuple[object, ...]) -> None:
    """Set an unset or "auto" micro-batch size in the configuration to the smallest batch size of the loaders."""
    if ds_config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        sizes = [obj.batch_size for obj in objects if isinstance(obj, DataLoader) and obj.batch_size is not None]
        if sizes:
            ds_config["train_micro_batch_size_per_gpu"] = min(sizes)


def _why_not_split(ds_config: Any, has_parallelism: bool) -> str:
    """Return the message for a sequence-parallel size of 1. ``has_parallelism``: there is a ParallelismConfig."""
    sized_by = '"sequence_parallel_size"' if read_training_facts(ds_config).sp_size == 1 else None
    if sized_by is None and has_parallelism:
        sized_by = "sp_size of the ParallelismConfig"
    if sized_by is None:
        return (
            'the "heterogeneity" section splits sequences over ranks, but accelerate does not split them. Give it '
            'ParallelismConfig(sp_backend="deepspeed", sp_size=N), with N the ranks that share a sequence; or give '
            'every rank a different batch: "heterogeneity": {"batch": [6, 2]}.'
        )
    return (
        f"{sized_by} is 1, which makes every rank a replica. Under accelerate and the HF Trainer such replicas take "
        'batches by "heterogeneity": {"batch": [6, 2]}, the samples of every rank, or "by_speed". Or let N > 1 ranks '
        'share a sequence: leave the size out, or give ParallelismConfig(sp_backend="deepspeed", sp_size=N).'
    )


@contextlib.contextmanager
def _steps_of_replicas(objects: tuple[Any, ...], sp_size: int) -> Iterator[None]:
    """Let accelerate divide the total steps of a DummyScheduler by the number of replicas.

    ``_prepare_deepspeed`` divides them by the number of processes, sp_size times as many.
    """
    schedulers = [obj for obj in objects if isinstance(obj, DummyScheduler) and obj.total_num_steps is not None]
    for scheduler in schedulers:
        scheduler.total_num_steps *= sp_size
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.total_num_steps //= sp_size


def _prepare_data_loader(stock: Function, dataloader: Any, *args: object, **kwargs: object) -> object:
    """Replace ``prepare_data_loader`` inside `loaders_over_replicas`: divide batches among replicas."""
    sharding = _sharding.get()
    if sharding is None:
        return stock(dataloader, *args, **kwargs)
    batches = sharding.batches
    if sharding.by_mode and batches is not None:
        return LoaderByMode(stock(dataloader, *args, **kwargs), dataloader)
    num_replicas = dist.get_world_size() // sharding.sp_size
    replica = dist.get_rank() // sharding.sp_size
    if batches is not None:
        dataloader = replica_samples(dataloader, batches.split, batches.replica_id, is_of_rank=sharding.sp_size == 1)
        num_replicas, replica = 1, 0  # the loader has only this replica's samples; accelerate divides nothing more
    kwargs.update(num_processes=num_replicas, process_index=replica)
    if kwargs.get("dispatch_batches"):
        raise ConfigError(
            "dispatch_batches=True (of accelerator_config, or of DataLoaderConfiguration) lets rank 0 read all batches "
            "and deal them out to ranks, which share each sequence here. Leave dispatch_batches out, or set it to "
            "False: every rank reads the same batches, and keeps its part."
        )
    if isinstance(dataloader.dataset, IterableDataset) and kwargs.get("dispatch_batches") is None:
        kwargs["dispatch_batches"] = False  # accelerate's default would let rank 0 divide them
    if num_replicas == 1 and not sharding.evaluates:
        # Samplers shuffle by torch's random state, which then has to be the same on all ranks. With several replicas,
        # accelerate synchronizes a generator of the sampler.
        kwargs["rng_types"] = ["torch"]
    prepared = stock(dataloader, *args, **kwargs)
    if batches is not None:
        # ``begin`` and ``end`` register the loader, so that accelerate steps the optimizer at the end of an epoch. But
        # this loader is read ahead by an optimizer step, and would announce the end too early. Every optimizer step has
        # the same number of micro-batches, so accelerate's count of these is enough.
        prepared.begin = prepared.end = _do_nothing
    return prepared


def _do_nothing() -> None:
    pass


def _step(stock: Function, scheduler: Any, *args: object, **kwargs: object) -> None:
    """Replace ``AcceleratedScheduler.step``, which steps the schedule once per process: step it once per replica."""
    state = AcceleratorState()
    if state.distributed_type != DistributedType.DEEPSPEED or not enabled(state.deepspeed_plugin.deepspeed_config):
        stock(scheduler, *args, **kwargs)
        return
    sp_size = state.parallelism_config.sp_size if state.parallelism_config is not None else 1
    with _counting(state.num_processes // sp_size):
        stock(scheduler, *args, **kwargs)


def _set_state(**values: Any) -> None:
    """Set attributes of accelerate's process-wide state, which is stored in two singletons."""
    PartialState._shared_state.update(values)
    AcceleratorState._shared_state.update(values)
