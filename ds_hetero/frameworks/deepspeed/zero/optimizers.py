"""Weighted ZeRO in DeepSpeed's engine: the optimizers put in place while it is built, and what they cannot do.

    weights, nodes = agree_on_owners(start, ds_config, model, optimizer)
    with optimizers_in_place(ds_config, weights, nodes):
        engine, *_ = deepspeed.initialize(...)
    checkpoints = stage3_checkpoints(engine)

Nothing of DeepSpeed stays replaced after that but what `install` has replaced, until a handle is undone.
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
from ds_hetero.frameworks.deepspeed.zero.stage3 import make_stage3_optimizer
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.frameworks.deepspeed.zero.stage3_checks import check_nodes, check_stage3
from ds_hetero.frameworks.deepspeed.zero.stage12 import WeightedZeroOptimizer
from ds_hetero.frameworks.deepspeed.zero.user_optimizer import keep_adagrad, take_no_step, why_inexact
from ds_hetero.frameworks.deepspeed.zero.weighted_shards import shard_of
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.sharding.zero_partition import check_weights, is_even, node_sizes
from ds_hetero.values.section import SECTION

logger = logging.getLogger(__name__)


def install(patches: Patches) -> None:
    """Let DeepSpeed detach flat parameters, average all gradients, and gather and partition weighted ones as we do."""
    patches.replace(DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", around(_flatten_detached))
    patches.replace(stage_1_and_2, "split_half_float_double", around(_split_all))
    patches.replace(deepspeed.zero.Init, "_all_gather", around(_gather_weighted))
    patches.replace(deepspeed.zero.Init, "_partition_param", around(_write_back))


def _flatten_detached(stock: Function, *args: object, **kwargs: object) -> Tensor:
    """Replace ``flatten_dense_tensors_aligned``: DeepSpeed 0.18.7 to 0.18.9 leave flat parameters in the graph.

    Its parts are views, which torch does not let be written in place, so that on CPUs the first step fails.
    """
    flat: Tensor = stock(*args, **kwargs)
    return flat.detach()


def _split_all(stock: Function, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Replace ``split_half_float_double``: average dense gradients of every type over the ranks.

    DeepSpeed 0.18.9 compares ``Tensor.type()`` with names such as "torch.cpu.FloatTensor", while torch says
    "torch.FloatTensor" of a tensor on a CPU: it has no buckets there, and ranks keep their own gradients where these
    are not contiguous. 0.19.8 leaves out sparse ones alone.
    """
    buckets: list[list[Tensor]] = stock(tensors)
    split = {id(tensor) for bucket in buckets for tensor in bucket}
    left: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if id(tensor) not in split and tensor.layout == torch.strided:
            left.setdefault(tensor.dtype, []).append(tensor)
    return [*buckets, *left.values()]


def _gather_weighted(
    stock: Function, init: object, param_list: Sequence[ZeroParameter], *args: object, **kwargs: object
) -> object:
    """Replace `Init._all_gather`: gather weighted parameters here, and let DeepSpeed gather others."""
    others = [param for param in param_list if not is_weighted(param)]
    missing = [param for param in param_list if is_weighted(param) and param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    if missing:
        missing[0].all_gather_coalesced(missing).wait()
    return stock(init, others, *args, **kwargs)


def _write_back(
    stock: Function, init: object, param: ZeroParameter, *args: object, has_been_updated: bool = False, **kwargs: object
) -> object:
    """Replace `Init._partition_param`: write a whole parameter that was changed to its weighted shard."""
    if is_weighted(param) and has_been_updated and param.ds_status is ZeroParamStatus.AVAILABLE:
        param.ds_tensor.data.copy_(shard_of(param, param.data))
        has_been_updated = False  # what is left to do is to free the whole
    return stock(init, param, *args, has_been_updated=has_been_updated, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """Replacement of DeepSpeed's optimizer for one ZeRO stage."""

    module: str  # where the engine looks for DeepSpeed's class
    name: str
    make: Function  # takes the arguments of that class, and ``weights``
    check: Callable[[Content], None]  # raises `ConfigError` for a configuration with which unequal weights do not work


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
"""By ZeRO stage."""


def agree_on_owners(
    start: JobStart, ds_config: DsConfig, model: nn.Module, optimizer: Any
) -> tuple[tuple[float, ...], Nodes | None]:
    """Return one weight per rank, and the nodes of which each owns all, if any. Raises `ConfigError` on every rank.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`; those of `Nodes.of_job`.
    """
    within = start.section.zero_within

    def decide() -> tuple[tuple[float, ...], int]:
        weights = _weights_of(start, dist.get_world_size())
        expect_possible(ds_config, weights, model, optimizer)
        return weights, int(os.environ.get("LOCAL_RANK", -1))

    decided = on_all_ranks(decide)
    weights, nodes = decided[0][0], None
    if within is not None:
        nodes = Nodes.of_job(node_sizes(within, [local_rank for _, local_rank in decided]), weights)
    if dist.get_rank() == 0 and (text := why_inexact(optimizer, start.facts.training.zero_stage)):
        announce(text)
    if dist.get_rank() == 0 and not (is_even(weights) and nodes is None):
        owning = [weights] if nodes is None else nodes.weights
        shares = ", ".join(f"{weight / sum(of_node):.1%}" for of_node in owning for weight in of_node)
        logger.info("ZeRO-%d partitions by rank: %s", start.facts.training.zero_stage, shares)
    return weights, nodes


def _weights_of(start: JobStart, world_size: int) -> tuple[float, ...]:
    """Return the ZeRO shares of all ranks that the section asks for. Raises `ConfigError`; see `check_weights`."""
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
    """Refuse settings that rule out unequal partitions. Raises `ConfigError`: names them.

    Args:
        weights: one per rank; equal ones are always possible.
    """
    is_within = ds_config.get(SECTION, {}).get("zero_within") is not None
    if is_within:
        check_nodes(ds_config)
    if is_even(weights) and not is_within:
        return
    training = read_training_facts(ds_config)
    if training.zero_stage == 0:
        raise ConfigError(
            '"zero_partition" has nothing to partition without ZeRO. Set "zero_optimization": {"stage": 1} or higher, '
            'or leave "zero_partition" out.'
        )
    if training.zero_stage not in OPTIMIZERS:
        stages = " or ".join(map(str, sorted(OPTIMIZERS)))
        raise ConfigError(f'"zero_partition" does not work with ZeRO stage {training.zero_stage}; use {stages}.')
    refused = []
    if "muon" in f"{training.optimizer} {type(optimizer).__name__}".lower():
        refused.append("the Muon optimizer")
    if model is not None and any(isinstance(part, MoE) for part in model.modules()):
        refused.append("a mixture of experts over expert-parallel groups")
    if refused:
        raise ConfigError(
            f'"zero_partition" other than "uniform", and "zero_within", do not work together with '
            f"{' and '.join(refused)}, which computes with equal partitions of the job. Remove one of them."
        )
    OPTIMIZERS[training.zero_stage].check(ds_config)


@contextlib.contextmanager
def optimizers_in_place(ds_config: DsConfig, weights: Sequence[float], nodes: Nodes | None) -> Iterator[None]:
    """Let an engine that is built inside take our optimizer for its ZeRO stage, if there is one, and take no step."""
    patches = Patches()
    training = read_training_facts(ds_config)
    if ours := OPTIMIZERS.get(training.zero_stage):
        make = functools.partial(ours.make, weights=weights, **({} if nodes is None else {"nodes": nodes}))
        patches.replace(importlib.import_module(ours.module), ours.name, around(_choose, make))
    for stock in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        patches.replace(stock, "initialize_optimizer_states", around(keep_adagrad))
    for stock_of_half in (FP16_Optimizer, FP16_UnfusedOptimizer):
        patches.replace(stock_of_half, "initialize_optimizer_states", around(take_no_step))
    in_fp32 = training.accumulates_in_fp32 and training.mixed_precision == "bfloat16"
    if training.zero_stage == 1 and not is_even(weights) and in_fp32:
        # For bf16 parameters and fp32 accumulation DeepSpeed has an optimizer of its own, with equal partitions. The
        # one of all other cases computes the same; both reduce in "communication_data_type", by default bf16.
        patches.replace(engine_module.DeepSpeedEngine, "_do_optimizer_sanity_check", around(_without_bf16_optimizer))
    try:
        yield
    finally:
        patches.undo()


def stage3_checkpoints(engine: Engine) -> Stage3Checkpoints | None:
    """Make what reads and writes the checkpoints of an engine; None where DeepSpeed does it alone."""
    ours = OPTIMIZERS.get(engine.zero_optimization_stage()) is _STAGE_3
    has_state = isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)  # not so without an optimizer
    return Stage3Checkpoints(engine) if ours and has_state else None


def _choose(ours: Function, stock: Function, *args: object, **kwargs: object) -> object:
    """Make our optimizer, but DeepSpeed's for experts, whose groups have fewer ranks than there are weights."""
    if kwargs.get("has_moe_layers"):
        return stock(*args, **kwargs)
    return ours(*args, **kwargs)


def _without_bf16_optimizer(check: Function, engine: Any, basic_optimizer: Any) -> object:
    chosen = check(engine, basic_optimizer)
    return engine_module.ZERO_OPTIMIZATION if chosen == engine_module.BFLOAT16 else chosen
