"""The script's optimizer inside DeepSpeed's: it steps on other tensors than the script gave it, and stays its object.

On ZeRO 1 to 3 these are flat shards of parameters; without ZeRO, in 16 bits, copies in fp32.

DeepSpeed makes torch's Adagrad anew, since that makes its state when it is made: of all parameters in one group, by the
defaults, so that rates and decays of groups, and every scheduler of the script's, are lost. Here the object stays, and
gets the state of the flat shards.

What an optimizer computes of a parameter as a whole, it would compute of a shard of many parameters instead.

Without ZeRO, in 16 bits, DeepSpeed takes a step with gradients of zero while it builds the engine, so that the state is
there. It counts: Adam corrects its moments as of the second step in the first one, which becomes a quarter smaller, and
weights decay once more. That step is left out.
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

_OF_WHOLE_PARAMETERS = {
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
"""By class; DeepSpeed's own Muon has another name, and knows of shards."""


def why_inexact(optimizer: object, zero_stage: int) -> str | None:
    """Return why an optimizer that treats parameters as a whole is inexact on shards; None for any other."""
    name = type(optimizer).__name__
    if zero_stage == 0 or not isinstance(optimizer, Optimizer) or name not in _OF_WHOLE_PARAMETERS:
        return None
    return (
        f"{name} {_OF_WHOLE_PARAMETERS[name]}, and ZeRO stage {zero_stage} gives every rank flat shards of many "
        "parameters: it trains as with stock DeepSpeed on as many ranks, and not as on one process. "
        '"zero_optimization": {"stage": 0} is exact, and so is an optimizer of single elements, such as AdamW'
    )


def keep_adagrad(stock: Function, zero_optimizer: Any) -> None:
    """Replace ``initialize_optimizer_states`` of ZeRO's optimizers, while an engine is built."""
    optimizer = zero_optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Adagrad):
        stock(zero_optimizer)
        return
    if getattr(zero_optimizer, "swap_optimizer", False):
        raise ConfigError(
            'torch\'s Adagrad makes its state when it is made, which "offload_optimizer" to NVMe does not find. '
            'Offload to "cpu", or take another optimizer.'
        )
    stock(zero_optimizer)
    zero_optimizer.optimizer = optimizer
    optimizer.state.clear()
    stage3_flats = getattr(zero_optimizer, "fp32_partitioned_groups_flat", None)
    _begin_adagrad(optimizer, zero_optimizer.single_partition_of_fp32_groups if stage3_flats is None else stage3_flats)


def take_no_step(stock: Function, half_optimizer: Any) -> None:
    """In the place of ``initialize_optimizer_states`` of optimizers of 16 bits without ZeRO, while an engine is built.

    All but torch's Adagrad make their state at their first step. DeepSpeed's 1-bit optimizers take the step of zeros as
    the one that makes it, and nothing else.
    """
    optimizer = half_optimizer.optimizer
    if hasattr(optimizer, "initialize"):  # 1-bit, of releases before 0.19.8: deepspeed/runtime/fp16/onebit/adam.py
        stock(half_optimizer)
    elif isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        _begin_adagrad(optimizer, [copy for group in optimizer.param_groups for copy in group["params"]])


def _begin_adagrad(optimizer: torch.optim.Adagrad, tensors: Sequence[Tensor]) -> None:
    """Make its state as torch's ``Adagrad.__init__`` does for its parameters, by the default of all groups."""
    for tensor in tensors:
        optimizer.state[tensor] = {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "sum": torch.full_like(tensor, optimizer.defaults["initial_accumulator_value"]),
        }


class SameNumberOfGroups:
    """A check of steps: no parameter group was added to the optimizer since ZeRO has flattened those it had."""

    width = 1

    def __init__(self, engine: Engine) -> None:
        self._optimizer = engine.optimizer
        self._is_flat = engine.zero_optimization_stage() > 0
        self._count = self._groups()

    def _groups(self) -> int:
        return len(getattr(self._optimizer, "param_groups", ()))

    def numbers(self) -> Sequence[float]:
        """Groups beyond those at the start."""
        return [float(self._groups() - self._count if self._is_flat else 0)]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        added = [int(count) for (count,) in rows]
        if not any(added):
            return None
        return ConfigError(
            f"parameter groups were added to the optimizer after deepspeed.initialize (by rank {added}). ZeRO has cut "
            "the groups into flat shards there, and would not train what is added. Put all groups into the optimizer "
            "before, those of parameters to be trained later with lr=0."
        )
