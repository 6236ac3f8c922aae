"""Let DeepSpeed build its engine with our weighted ZeRO optimizers, and refuse settings that these do not support.

    weights, nodes = agree_on_owners(start, ds_config, model, optimizer)
    with optimizers_in_place(ds_config, weights, nodes):
        engine, *_ = deepspeed.initialize(...)
    checkpoints = stage3_checkpoints(engine)

After the ``with`` block DeepSpeed uses its own classes again. Only the functions that `install` replaces stay replaced,
until the handle of the registration is undone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.runtime.engine as engine_module
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds_hetero.common.announce import announce
from ds_hetero.decision.decide import JobStart
from ds_hetero.engine.ds_config import DsConfig, read_training_facts
from ds_hetero.engine.patching import Function, Patches, around
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import Content, Engine, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.nodes import Nodes
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import is_weighted
from ds_hetero.frameworks.deepspeed.zero.stage3 import gather_only_partitioned, make_stage3_optimizer
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.frameworks.deepspeed.zero.stage3_checks import check_nodes, check_stage3
from ds_hetero.frameworks.deepspeed.zero.stage12 import WeightedZeroOptimizer
from ds_hetero.frameworks.deepspeed.zero.user_optimizer import inexactness_reason, keep_adagrad, skip_initial_step
from ds_hetero.frameworks.deepspeed.zero.weighted_shards import shard_of
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.sharding.zero_partition import check_weights, is_even, node_sizes
from ds_hetero.values.section import SECTION

logger = logging.getLogger(__name__)


def install(patches: Patches) -> None:
    """Replace functions of DeepSpeed: two that have faults, and those that meet weighted parameters or experts."""
    patches.replace(DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", around(_flatten_detached))
    patches.replace(stage_1_and_2, "split_half_float_double", around(_split_all))
    patches.replace(deepspeed.zero.Init, "_all_gather", around(_gather_weighted))
    patches.replace(deepspeed.zero.Init, "_partition_param", around(_write_back))
    gather_only_partitioned(patches)


def _flatten_detached(stock: Function, *args: object, **kwargs: object) -> Tensor:
    """Replace ``flatten_dense_tensors_aligned``: detach the flat parameters, which DeepSpeed 0.18.7 to 0.18.9 do not.

    The parts of an attached flat parameter are views, which torch forbids to write in place, so that on CPUs the first
    step fails.
    """
    flat: Tensor = stock(*args, **kwargs)
    return flat.detach()


def _split_all(stock: Function, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Replace ``split_half_float_double``: put dense gradients of every dtype into buckets, which ranks average.

    DeepSpeed 0.18.9 compares ``Tensor.type()`` with names such as "torch.cpu.FloatTensor", but on a CPU torch's name is
    "torch.FloatTensor". So DeepSpeed makes no buckets there, and gradients that are not contiguous are not averaged.
    0.19.8 leaves out sparse gradients only.
    """
    buckets: list[list[Tensor]] = stock(tensors)
    in_buckets = {id(tensor) for bucket in buckets for tensor in bucket}
    missing: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if id(tensor) not in in_buckets and tensor.layout == torch.strided:
            missing.setdefault(tensor.dtype, []).append(tensor)
    return [*buckets, *missing.values()]


def _gather_weighted(
    stock: Function, init: object, param_list: Sequence[ZeroParameter], *args: object, **kwargs: object
) -> object:
    """Replace ``zero.Init._all_gather``: gather weighted parameters here, and let DeepSpeed gather others."""
    equal = []
    weighted = []
    for param in param_list:
        if not is_weighted(param):
            equal.append(param)
        elif param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            weighted.append(param)
    if weighted:
        weighted[0].all_gather_coalesced(weighted).wait()
    return stock(init, equal, *args, **kwargs)


def _write_back(
    stock: Function, init: object, param: ZeroParameter, *args: object, has_been_updated: bool = False, **kwargs: object
) -> object:
    """Replace ``zero.Init._partition_param``: copy a gathered parameter that was changed to its weighted shard."""
    if is_weighted(param) and has_been_updated and param.ds_status is ZeroParamStatus.AVAILABLE:
        param.ds_tensor.data.copy_(shard_of(param, param.data))
        has_been_updated = False  # so that DeepSpeed only frees the gathered parameter
    return stock(init, param, *args, has_been_updated=has_been_updated, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """How DeepSpeed's optimizer class of one ZeRO stage is replaced by ours."""

    module: str  # name of the module in which the engine looks up DeepSpeed's class
    name: str  # name of DeepSpeed's class in that module
    make: Function  # makes our optimizer from the arguments of that class, and ``weights``
    check: Callable[[Content], None]  # raises `ConfigError` if a configuration does not work with unequal weights


_STAGES_1_AND_2 = Replacement(
    module="deepspeed.runtime.engine",
    name="DeepSpeedZeroOptimizer",
    make=WeightedZeroOptimizer,
    check=lambda ds_config: None,
)
_STAGE_3 = Replacement(
    module="deepspeed.runtime.zero.stage3",
    name="DeepSpeedZeroOptimizer_Stage3",
    make=make_stage3_optimizer,
    check=check_stage3,
)
OPTIMIZERS: dict[int, Replacement] = {1: _STAGES_1_AND_2, 2: _STAGES_1_AND_2, 3: _STAGE_3}
"""Replacements by ZeRO stage."""


def agree_on_owners(
    start: JobStart, ds_config: DsConfig, model: nn.Module, optimizer: Any
) -> tuple[tuple[float, ...], Nodes | None]:
    """Return the ZeRO weight of every rank, and with ``"zero_within"`` the nodes that each own all parameters.

    Rank 0 logs the shares, and announces if the optimizer is inexact on shards.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`; with ``"zero_within"`` those of `Nodes.of_job`.

    Raises:
        ConfigError: on every rank: the settings do not work together.
    """
    within = start.section.zero_within

    def read_weights() -> tuple[tuple[float, ...], int]:
        weights = _zero_weights(start, dist.get_world_size())
        expect_possible(ds_config, weights, model, optimizer)
        return weights, int(os.environ.get("LOCAL_RANK", -1))

    by_rank = on_all_ranks(read_weights)
    weights, _ = by_rank[0]
    local_ranks = [local_rank for _, local_rank in by_rank]
    nodes = None if within is None else Nodes.of_job(node_sizes(within, local_ranks), weights)
    if dist.get_rank() == 0:
        if text := inexactness_reason(optimizer, start.facts.training.zero_stage):
            announce(text)
        if nodes is not None or not is_even(weights):
            _log_shares(start.facts.training.zero_stage, [weights] if nodes is None else nodes.weights)
    return weights, nodes


def _log_shares(zero_stage: int, weights_of_owners: Sequence[Sequence[float]]) -> None:
    """Log the share of the parameters that each rank owns.

    Args:
        weights_of_owners: weights of the ranks that own all parameters together: all ranks, or the ranks of a node.
    """
    shares = []
    for weights in weights_of_owners:
        total = sum(weights)
        shares += [f"{weight / total:.1%}" for weight in weights]
    logger.info("ZeRO-%d partitions by rank: %s", zero_stage, ", ".join(shares))


def _zero_weights(start: JobStart, world_size: int) -> tuple[float, ...]:
    """Return the ZeRO weights of all ranks, from ``"zero_partition"``. Raises `ConfigError`; see `check_weights`."""
    setting = start.section.zero_partition
    if setting == "uniform":
        return (1.0,) * world_size
    weights = setting if isinstance(setting, list) else start.zero_weights
    assert weights is not None
    check_weights(weights, world_size, zero_stage=start.facts.training.zero_stage)
    return tuple(weights)


def expect_possible(
    ds_config: DsConfig, weights: Sequence[float], model: nn.Module | None, optimizer: Any = None
) -> None:
    """Check that the settings, the model and the optimizer work with these weights and with ``"zero_within"``.

    Args:
        weights: one per rank; equal ones always work.
        model: None to check the settings alone.
        optimizer: the script's optimizer, if there is one.

    Raises:
        ConfigError: it names what does not work.
    """
    cuts_inside_nodes = ds_config.get(SECTION, {}).get("zero_within") is not None
    if cuts_inside_nodes:
        check_nodes(ds_config)
    if is_even(weights) and not cuts_inside_nodes:
        return
    training = read_training_facts(ds_config)
    if training.zero_stage == 0:
        raise ConfigError(
            '"zero_partition" needs ZeRO, but "zero_optimization" has stage 0. Set {"stage": 1} or higher, or leave '
            '"zero_partition" out.'
        )
    if training.zero_stage not in OPTIMIZERS:
        stages = " or ".join(map(str, sorted(OPTIMIZERS)))
        raise ConfigError(f'"zero_partition" does not work with ZeRO stage {training.zero_stage}; use stage {stages}.')
    unsupported = []
    if "muon" in f"{training.optimizer} {type(optimizer).__name__}".lower():
        unsupported.append("the Muon optimizer")
    if model is not None and any(isinstance(module, MoE) for module in model.modules()):
        unsupported.append("a mixture of experts over expert-parallel groups")
    if unsupported:
        raise ConfigError(
            f'"zero_partition" other than "uniform", and "zero_within", do not work together with '
            f"{' and '.join(unsupported)}, which needs equal partitions over all ranks. Use another optimizer or "
            'model, or leave "zero_partition" and "zero_within" out.'
        )
    OPTIMIZERS[training.zero_stage].check(ds_config)


@contextlib.contextmanager
def optimizers_in_place(
    ds_config: DsConfig, weights: Sequence[float], nodes: Nodes | None, *, has_experts: bool = False
) -> Iterator[None]:
    """Let an engine that is built inside the context use our optimizer for its ZeRO stage.

    The script's optimizer is kept exact, see `ds_hetero.frameworks.deepspeed.zero.user_optimizer`.

    Args:
        has_experts: whether experts are divided among the ranks, whose gradients count for the norm.
    """
    patches = Patches()
    training = read_training_facts(ds_config)
    if replacement := OPTIMIZERS.get(training.zero_stage):
        options: dict[str, Any] = {"weights": weights}
        if nodes is not None:
            options["nodes"] = nodes
        make = functools.partial(replacement.make, **options)
        patches.replace(importlib.import_module(replacement.module), replacement.name, around(_make_optimizer, make))
    for zero_class in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        patches.replace(zero_class, "initialize_optimizer_states", around(keep_adagrad))
    for half_class in (FP16_Optimizer, FP16_UnfusedOptimizer):
        patches.replace(half_class, "initialize_optimizer_states", around(skip_initial_step))
    is_bf16_with_fp32_sums = training.accumulates_in_fp32 and training.mixed_precision == "bfloat16"
    needs_ours = has_experts or not is_even(weights)
    if training.zero_stage == 1 and needs_ours and is_bf16_with_fp32_sums:
        # For bf16 parameters and fp32 accumulation DeepSpeed uses BF16_Optimizer, which has equal partitions only. Its
        # optimizer for all other cases computes the same; both reduce in "communication_data_type", by default bf16.
        patches.replace(engine_module.DeepSpeedEngine, "_do_optimizer_sanity_check", around(_without_bf16_optimizer))
    try:
        yield
    finally:
        patches.undo()


def stage3_checkpoints(engine: Engine) -> Stage3Checkpoints | None:
    """Return the object that saves and loads an engine's checkpoints of ZeRO-3; None for other stages.

    An engine without an optimizer has no optimizer state to repartition, and gets None, too.
    """
    is_stage_3 = OPTIMIZERS.get(engine.zero_optimization_stage()) is _STAGE_3
    has_state = isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)
    return Stage3Checkpoints(engine) if is_stage_3 and has_state else None


def _make_optimizer(make: Function, stock: Function, *args: object, **kwargs: object) -> object:
    """Replace DeepSpeed's optimizer class: make our optimizer; for a model with expert parallelism DeepSpeed's.

    The groups of expert-parallel parameters have fewer ranks than there are weights.
    """
    if kwargs.get("has_moe_layers"):
        return stock(*args, **kwargs)
    return make(*args, **kwargs)


def _without_bf16_optimizer(stock: Function, engine: Any, basic_optimizer: Any) -> object:
    """Replace ``_do_optimizer_sanity_check``: choose DeepSpeed's ZeRO optimizer instead of BF16_Optimizer."""
    optimizer_kind = stock(engine, basic_optimizer)
    return engine_module.ZERO_OPTIMIZATION if optimizer_kind == engine_module.BFLOAT16 else optimizer_kind
