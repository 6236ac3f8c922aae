"""DeepSpeed: the engine is built as if there were no sequence parallelism, and everybody else is told the truth.

DeepSpeed divides gradients by world size over sequence-parallel size on most paths and by the plain world size on
others (ZeRO-3 with reduce_scatter). Shown no sequence parallelism while an engine is built, it divides by the plain
world size on all of them, which is right for the loss recipe that DeepSpeed and transformers document (an all_gather
of the ranks' mean losses, weighted by tokens, whose backward adds up over the ranks) and for `Handle.loss`. Batch
sizes are kept right by `sequence_parallel_size` in the configuration, which `DeepSpeedConfig` reads where it is given
no mpu. Afterwards `deepspeed.utils.groups` answers for the replica.

All private names of DeepSpeed that ds_hetero knows are in this file, in its neighbours `zero` and `checkpoints`, and in
the optimizers of `ds_hetero.zero`; `PRIVATE_NAMES` lists them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as stock_mpu
import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import groups
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.integrations.deepspeed import checkpoints
from ds_hetero.integrations.deepspeed.checkpoints import guard_checkpoints
from ds_hetero.integrations.deepspeed.facts import enabled
from ds_hetero.integrations.deepspeed.losses import LossScaling
from ds_hetero.integrations.deepspeed.zero import optimizers, stage3, stage3_shards, stage12
from ds_hetero.integrations.handle import Handle
from ds_hetero.integrations.loader import ModelLoader
from ds_hetero.job.resolve import sp_size_of
from ds_hetero.plan import BatchSplit
from ds_hetero.runtime.collectives import reporting_lost_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import IDLE, running_clock

__all__ = ["PRIVATE_NAMES", "WORKS", "SequenceParallelState", "install"]

WORKS = ">=0.19.5,<0.20"
# Where a rank waits for others outside of attention: for gradients, parameters, norms and flags.
_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
_HANDLES = ("AllGatherCoalescedHandle", "AllGatherHandle")
PRIVATE_NAMES = (
    "deepspeed:initialize",
    "deepspeed:load_ds_config",
    "deepspeed:DeepSpeedEngine.backward",
    "deepspeed:DeepSpeedEngine.set_train_batch_size",
    "deepspeed:DeepSpeedEngine.set_train_micro_batch_size",
    "deepspeed.utils.groups:mpu",
    "deepspeed.utils.groups:mesh_device",
    "deepspeed.utils.groups:_get_sequence_parallel_group",
    "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.register_with_transformers",
    "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPDataLoaderAdapter.__init__",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp:get_sequence_parallel_world_size",
    *optimizers.PRIVATE_NAMES,
    *checkpoints.PRIVATE_NAMES,
    *stage12.PRIVATE_NAMES,
    *stage3.PRIVATE_NAMES,
    *(f"deepspeed.comm.torch:TorchBackend.{name}" for name in _COLLECTIVES),
    *(f"deepspeed.runtime.zero.partition_parameters:{name}.wait" for name in _HANDLES),
)

# What gloo and NCCL say when another rank is gone; no class of exception tells it from other failures.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out|timeout|NCCL error|connection refused", re.I
)


class SequenceParallelState:
    """The answers of `deepspeed.utils.groups` and of the mpu that users are given, for one replica.

    ``initialize_sequence_parallel`` marks it, as in DeepSpeed, as an mpu without model parallelism.

    Args:
        replica: this rank's.
        asked: the sequence-parallel size that the user gave, if any; all ranks where replicas have different sizes.
    """

    def __init__(self, replica: Replica, asked: int | None) -> None:
        self._replica, self.asked = replica, asked

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Groups exist already."""
        raise ConfigError("the sequence-parallel groups were made by ds_hetero; do not initialize them again.")

    def get_sequence_parallel_group(self) -> Any:
        """All ranks of this replica."""
        return self._replica.sp_group

    def get_sequence_parallel_world_size(self) -> int:
        """Ranks of this replica."""
        return self._replica.sp_size

    def get_sequence_parallel_rank(self) -> int:
        """This rank's index in its replica."""
        return self._replica.sp_rank

    def get_sequence_data_parallel_group(self) -> Any:
        """All ranks: ZeRO partitions over them."""
        return dist.group.WORLD

    def get_sequence_data_parallel_world_size(self) -> int:
        """Ranks of the job."""
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank."""
        return dist.get_rank()


@dataclass
class _Pending:
    """A stock registration made before the configuration was known.

    Args:
        core: the key of `ALL_ATTENTION_FUNCTIONS` that it replaced.
        undo: puts that back.
        error: what stock raised; raised again if no section is found after all.
        adapters: loaders that were wrapped by stock since.
    """

    core: str
    undo: Callable[[], None]
    error: Exception | None = None
    adapters: int = 0


def install(handle: Handle) -> None:
    """Replace the doors: registration, loader adapter, `deepspeed.initialize`; how ZeRO-3 gathers; time collectives."""
    door = _Door(handle)
    replace = handle.patches.replace
    replace(ulysses_sp.UlyssesSPAttentionHF, "register_with_transformers", door.registration)
    replace(ulysses_sp.UlyssesSPDataLoaderAdapter, "__init__", door.adapter)
    replace(deepspeed, "initialize", door.initialize)
    replace(deepspeed.zero.Init, "_all_gather", stage3_shards.gathering)
    replace(deepspeed.zero.Init, "_partition_param", stage3_shards.writing_back)
    for name in _COLLECTIVES:
        replace(TorchBackend, name, _timed)
    for name in _HANDLES:
        replace(getattr(partition_parameters, name), "wait", _timed)


class _Door:
    """Makes the replacements; remembers between them what the configuration has yet to decide."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._pending: _Pending | None = None

    # --- UlyssesSPAttentionHF.register_with_transformers --------------------------------------------

    def registration(self, original: Any) -> Any:
        """With a known section the model is converted; without any, stock runs and may be undone later."""
        stock = original.__func__
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def register_with_transformers(cls: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(cls, *args, **kwargs).arguments
            ds_config, size = self._handle.ds_config, given["sequence_parallel_size"]
            if ds_config is None:
                return self._register_stock(stock, given["core_attn_implementation"], cls, args, kwargs)
            if not enabled(ds_config):
                return stock(cls, *args, **kwargs)
            model = given["model_name_or_path"]
            if isinstance(model, torch.nn.Module):
                sizes = {"sequence_parallel_size": size, **_sizes_in(ds_config)}
                return SequenceParallelState(self._handle.convert(model, ds_config, sizes).replica, size)
            stock_mpu.initialize_sequence_parallel(size)  # the model is converted when deepspeed.initialize has it
            return stock_mpu

        return classmethod(register_with_transformers)

    def _register_stock(self, stock: Any, core: str, cls: Any, args: Any, kwargs: Any) -> Any:
        own = ALL_ATTENTION_FUNCTIONS._local_mapping
        before = own.get(core)

        def undo() -> None:
            own.pop(core, None)
            if before is not None:
                own[core] = before

        self._pending = _Pending(core, undo)
        try:
            return stock(cls, *args, **kwargs)
        except ValueError as error:
            if "divisible" not in str(error):
                raise
            self._pending.error = error  # heads that do not divide are no fault if there is a section
            return stock_mpu

    # --- UlyssesSPDataLoaderAdapter -----------------------------------------------------------------

    def adapter(self, stock: Any) -> Any:
        """With a converted model the new object becomes a `ModelLoader`, before it has anything of the adapter's."""

        @functools.wraps(stock)
        def init(adapter: Any, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
            model = self._handle.model_of_group(dist.get_process_group_ranks(sp_group))
            if model is not None:
                adapter.__class__ = ModelLoader
                ModelLoader.__init__(adapter, dl, model, torch.device(device))
                return
            if self._pending is not None:
                self._pending.adapters += 1
            stock(adapter, dl, sp_rank, sp_group, sp_world_size, device)

        return init

    # --- deepspeed.initialize -----------------------------------------------------------------------

    def initialize(self, stock: Any) -> Any:
        """With a section the model is converted and the engine built without sequence parallelism."""
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            given = dict(signature.bind(*args, **kwargs).arguments)
            ds_config = _configuration(given)
            pending, self._pending = self._pending, None
            if ds_config is None or not enabled(ds_config):
                if pending is not None and pending.error is not None:
                    raise pending.error
                self._handle.prepared_whole(given["model"])
                return stock(*args, **kwargs)
            if pending is not None:
                pending.undo()
                _expect_no_adapters(pending)
            return self._initialize(stock, given, ds_config)

        return initialize

    def _initialize(self, stock: Any, given: dict[str, Any], ds_config: Mapping[str, Any]) -> Any:
        model = given["model"]
        _expect_supported(model, ds_config)
        _init_distributed(given.get("dist_init_required"))
        sizes = {**_sizes_in(ds_config), **_size_of_mesh(given), **_size_of_mpu(given.get("mpu"))}
        converted = self._handle.convert(model, ds_config, sizes)
        replica = converted.replica
        given.update(
            args=_without_config(given.get("args")),
            config=_plain_configuration(ds_config, replica, sp_size_of(sizes)),
            config_params=None,
            mpu=None,
            mesh_param=None,
        )
        agreement = self._handle.agreement_on(converted)
        weights = optimizers.agree_on_weights(agreement, ds_config, model, given.get("optimizer"))
        truth = SequenceParallelState(replica, sp_size_of(sizes))
        with (
            _sequence_parallelism_hidden(truth, self._handle),
            optimizers.optimizers_in_place(given["config"], weights),
        ):
            engine, *rest = stock(**given)
        optimizers.prepare(engine)
        guard_checkpoints(engine)
        engine.dp_world_size = replica.num_replicas  # for set_train_batch_size; ZeRO's world is seq_dp_world_size
        engine.seq_parallel_group = replica.sp_group
        if replica.batch_split is not None:
            _tell_batches(engine, replica.batch_split, replica.replica_id)
        _scale_losses(engine, LossScaling(converted))
        for name in ("forward", "backward", "step"):
            setattr(engine, name, _naming_lost_peers(getattr(engine, name), name))
        self._handle.outlook(converted).watch(engine)
        self._handle.watch(engine, converted)
        return (engine, *rest)


# --- what the caller gave ------------------------------------------------------------------------------


def _configuration(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration as a mapping, by the rules of `deepspeed.initialize`; None where that will complain."""
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, Mapping):
        return config
    loaded: Mapping[str, Any] = deepspeed.load_ds_config(config)
    return loaded


def _without_config(args: Any) -> Any:
    """The command line's arguments without the configuration, which is given apart from them."""
    if getattr(args, "deepspeed_config", None) is None:
        return args
    args = copy.copy(args)
    args.deepspeed_config = None
    return args


def _sizes_in(ds_config: Mapping[str, Any]) -> dict[str, int | None]:
    return {"sequence_parallel_size of ds_config": ds_config.get("sequence_parallel_size")}


def _size_of_mesh(given: Mapping[str, Any]) -> dict[str, int | None]:
    mesh = given.get("mesh_param")
    return {"mesh_param of deepspeed.initialize": mesh[1] if mesh else None}


def _size_of_mpu(mpu: Any) -> dict[str, int | None]:
    if isinstance(mpu, SequenceParallelState):
        size = mpu.asked
    else:
        size = mpu.get_sequence_parallel_world_size() if hasattr(mpu, "get_sequence_parallel_world_size") else None
    return {"the mpu given to deepspeed.initialize": size}


def _expect_supported(model: Any, ds_config: Mapping[str, Any]) -> None:
    if isinstance(model, deepspeed.PipelineModule):
        raise ModelError("a PipelineModule cannot be split over the sequence; give deepspeed.initialize a plain model.")
    if ds_config.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        raise ConfigError('"tensor_parallel" and "heterogeneity" cannot be used together; remove one of them.')


def _expect_no_adapters(pending: _Pending) -> None:
    if pending.adapters:
        raise ConfigError(
            "a UlyssesSPDataLoaderAdapter was made before deepspeed.initialize, when ds_hetero did not know the "
            "configuration yet. Make it afterwards, or give the configuration earlier: ds_hetero.register(ds_config)."
        )


# --- building the engine -------------------------------------------------------------------------------


def _init_distributed(required: bool | None) -> None:
    """As `deepspeed.initialize` would a moment later; ranks choose their device before they first speak."""
    accelerator = deepspeed.get_accelerator()
    if "LOCAL_RANK" in os.environ:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(accelerator.communication_backend_name(), dist_init_required=required)


def _plain_configuration(ds_config: Mapping[str, Any], replica: Replica, sp_size: int | None) -> dict[str, Any]:
    """The configuration of an engine without sequence parallelism whose batches are those of the replicas.

    Batch sizes that follow from the others are filled in, since DeepSpeed would compute them as fractions. Replicas
    that take different batches are, to DeepSpeed, one that takes batches of one sample; `_tell_batches` corrects that.
    """
    config = {key: value for key, value in ds_config.items() if key != "data_parallel_size"}
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (config.get(name) for name in names)
    split, num_replicas = replica.batch_split, replica.num_replicas
    if split is not None:
        _expect_batch(split, dict(zip(names, (total, micro, steps), strict=True)), sp_size)
        num_replicas, total, micro, steps = 1, split.micro_steps, 1, split.micro_steps
    config["sequence_parallel_size"] = dist.get_world_size() / num_replicas
    if micro is None and total is not None:
        micro = total // ((steps or 1) * num_replicas)
    if steps is None and micro:
        steps = total // (micro * num_replicas) if total is not None else 1
    if total is None and micro and steps:
        total = micro * steps * num_replicas
    config.update({name: n for name, n in zip(names, (total, micro, steps), strict=True) if n is not None})
    return config


def _expect_batch(split: BatchSplit, given: Mapping[str, Any], sp_size: int | None) -> None:
    """The batch that the user asks for elsewhere must be that of the replicas; what is left out follows from them."""
    total, micro, steps = given.values()
    asked = {"train_batch_size": total}
    if micro is not None:
        workers = dist.get_world_size() // (sp_size or dist.get_world_size())
        product = f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps or 1} x {workers}"
        asked[product] = micro * (steps or 1) * workers
    for name, samples in asked.items():
        if samples is not None and samples != split.samples:
            raise ConfigError(
                f"the replicas of the schedule take {split} per optimizer step, but {name} is {samples}. "
                f"Make the global batch {split.samples}, leave it out where that is possible, or change the replicas' "
                "micro_batch_size and micro_batches."
            )


def _tell_batches(engine: Any, split: BatchSplit, replica_id: int) -> None:
    """Have the engine count and report the samples of all replicas."""
    engine._config.train_batch_size = engine.tput_timer.batch_size = split.samples
    engine._config.train_micro_batch_size_per_gpu = split.micro_batch_sizes[replica_id]

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"the batch cannot be changed while replicas take different ones ({split}); change their micro_batch_size "
            "and micro_batches in the schedule."
        )

    engine.set_train_batch_size = engine.set_train_micro_batch_size = refuse


def _scale_losses(engine: Any, scaling: LossScaling) -> None:
    """Have the engine's backward take losses of any convention, and its step check that it was used."""
    backward, step = engine.backward, engine.step

    @functools.wraps(backward)
    def scaled_backward(loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        divisor = engine.gradient_accumulation_steps() if scale_wrt_gas else 1
        with running_clock().phase(IDLE, "loss"):
            loss = scaling.scale(loss, divisor)
        return backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    @functools.wraps(step)
    def checked_step(*args: Any, **kwargs: Any) -> Any:
        scaling.expect_scaled()
        return step(*args, **kwargs)

    engine.backward, engine.step = scaled_backward, checked_step


@contextlib.contextmanager
def _sequence_parallelism_hidden(truth: SequenceParallelState, handle: Handle) -> Iterator[None]:
    """Inside, `groups` knows of no sequence parallelism, which engine and optimizers ask once; outside, the truth."""
    before = groups.mpu, groups.mesh_device
    groups.mpu = groups.mesh_device = None
    try:
        yield
    except BaseException:
        groups.mpu, groups.mesh_device = before
        raise
    groups.mpu = truth

    def restore() -> None:
        if groups.mpu is truth:
            groups.mpu, groups.mesh_device = before

    handle.patches.on_undo(restore)


def _timed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Have the clock of the running engine see how long a collective keeps this rank."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(stock)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with running_clock().phase(IDLE, stock.__name__):
            return stock(*args, **kwargs)

    wrapped: Callable[..., Any] = timed
    return wrapped


def _naming_lost_peers(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Have a collective that broke or timed out inside the engine reported as `PeerError`."""

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not _LOST_PEER.search(str(error)):
                raise
            with reporting_lost_peers(f"running the engine's {name}"):
                raise

    return guarded
