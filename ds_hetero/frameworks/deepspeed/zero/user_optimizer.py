"""Keep the script's optimizer exact inside DeepSpeed's engine, which replaces the tensors that it steps on.

On ZeRO 1 to 3 the new tensors are flat shards of many parameters; without ZeRO, in 16 bits, they are fp32 copies. This
has three consequences:

* Adagrad makes its state in its constructor, so DeepSpeed constructs it again for the new tensors. It uses the default
  options and one group, so that the learning rates and decays of groups, and the link to the script's schedulers, are
  lost. `keep_adagrad` keeps the script's object, and makes its state for the new tensors.
* An optimizer that computes something of a whole parameter, such as a norm, would compute it of a shard.
  `inexactness_reason` returns a warning about that.
* Without ZeRO, in 16 bits, DeepSpeed makes the optimizer's state by a step with gradients of zero while it builds the
  engine. That step counts: in the first real step Adam corrects its moments as in a second one, so that the step is a
  quarter smaller, and weights decay once more. `skip_initial_step` skips that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hetero.engine.patching import Function
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.runtime.step_checks import Verdict

_WHOLE_PARAMETER_OPTIMIZERS = {
    "Adafactor": "keeps rows and columns of matrices",
    "CAME": "keeps rows and columns of matrices",
    "LBFGS": "calls the forward from inside its step",
    "Lamb": "scales by the norms of parameters",
    "FusedLamb": "scales by the norms of parameters",
    "LARS": "scales by the norms of parameters",
    "SparseAdam": "takes sparse gradients",
    "SM3": "keeps rows and columns of matrices",
    "Shampoo": "multiplies matrices",
    "SOAP": "multiplies matrices",
    "Muon": "multiplies matrices",
}
"""What an optimizer computes of whole parameters, by name of its class. DeepSpeed's own Muon, which can work with
shards, has another name."""


def inexactness_reason(optimizer: object, zero_stage: int) -> str | None:
    """Return why an optimizer is inexact on ZeRO's shards; None if it updates each element by itself, or without ZeRO.

    Args:
        optimizer: the script's optimizer.
        zero_stage: 0 to 3.
    """
    name = type(optimizer).__name__
    if zero_stage == 0 or not isinstance(optimizer, Optimizer) or name not in _WHOLE_PARAMETER_OPTIMIZERS:
        return None
    return (
        f"{name} {_WHOLE_PARAMETER_OPTIMIZERS[name]}, and ZeRO stage {zero_stage} gives every rank flat shards of many "
        "parameters: it trains as with stock DeepSpeed on as many ranks, and not as on one process. "
        '"zero_optimization": {"stage": 0} is exact, and so is an optimizer of single elements, such as AdamW'
    )


def keep_adagrad(stock: Function, zero_optimizer: Any) -> None:
    """Replace ``initialize_optimizer_states`` of ZeRO's optimizers while an engine is built: keep a torch Adagrad.

    Raises:
        ConfigError: Adagrad's state is to be offloaded to NVMe.
    """
    optimizer = zero_optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Adagrad):
        stock(zero_optimizer)
        return
    if getattr(zero_optimizer, "swap_optimizer", False):
        raise ConfigError(
            'torch\'s Adagrad makes its state in its constructor, where "offload_optimizer" to NVMe cannot find it. '
            'Offload to "cpu", or use another optimizer.'
        )
    stock(zero_optimizer)
    zero_optimizer.optimizer = optimizer
    optimizer.state.clear()
    stage3_flats = getattr(zero_optimizer, "fp32_partitioned_groups_flat", None)
    flats = zero_optimizer.single_partition_of_fp32_groups if stage3_flats is None else stage3_flats
    _make_adagrad_state(optimizer, flats)


def skip_initial_step(stock: Function, half_optimizer: Any) -> None:
    """Replace ``initialize_optimizer_states`` of DeepSpeed's 16-bit optimizers without ZeRO while an engine is built.

    The replacement does nothing for most optimizers, which make their state at their first step. There are two
    exceptions. torch's Adagrad needs its state before. DeepSpeed's 1-bit optimizers only make their state in their
    first step, so they need a step of zeros, which does not count.
    """
    optimizer = half_optimizer.optimizer
    if hasattr(optimizer, "initialize"):  # 1-bit, of releases before 0.19.8: deepspeed/runtime/fp16/onebit/adam.py
        stock(half_optimizer)
    elif isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        _make_adagrad_state(optimizer, [copy for group in optimizer.param_groups for copy in group["params"]])


def _make_adagrad_state(optimizer: torch.optim.Adagrad, tensors: Sequence[Tensor]) -> None:
    """Make the state for ``tensors`` as torch's ``Adagrad.__init__`` does: with the default options, not a group's."""
    for tensor in tensors:
        optimizer.state[tensor] = {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "sum": torch.full_like(tensor, optimizer.defaults["initial_accumulator_value"]),
        }


class SameNumberOfGroups:
    """A check of steps: the script has not added a parameter group after ZeRO flattened the groups."""

    width = 1

    def __init__(self, engine: Engine) -> None:
        self._optimizer = engine.optimizer
        self._is_flat = engine.zero_optimization_stage() > 0
        self._initial_count = self._count_groups()

    def _count_groups(self) -> int:
        return len(getattr(self._optimizer, "param_groups", ()))

    def numbers(self) -> Sequence[float]:
        """Return one number: the groups that were added since the engine was built; 0 without ZeRO."""
        num_added = self._count_groups() - self._initial_count if self._is_flat else 0
        return [float(num_added)]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`: an error if groups were added on any rank."""
        num_added_by_rank = [int(count) for (count,) in rows]
        if not any(num_added_by_rank):
            return None
        return ConfigError(
            f"parameter groups were added to the optimizer after deepspeed.initialize (by rank {num_added_by_rank}). "
            "ZeRO cuts the groups into flat shards in deepspeed.initialize, and would not train groups that are added "
            "later. Put all groups into the optimizer before; give those that are to be trained later lr=0."
        )
