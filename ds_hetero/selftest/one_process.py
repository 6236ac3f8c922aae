"""Train one step in one process, and compare the step of all ranks with it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

CLIP = 1.0

# Largest difference that passes, relative to the norm of a tensor. Ranks add up float32 in another order than one
# process, which changes less than this. In 16 bits they also round gradients of tokens at other places: on two CPU
# ranks in bfloat16 the worst tensor of a step is off by 2e-3, and by 3e-3 in pipelines (`ds-hetero selftest --quick`
# prints it). float16 has three bits more; never measured.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def batch_of(length: int, vocab_size: int, samples: int = 1) -> dict[str, Tensor]:
    """Return ``samples`` random sequences of ``length`` tokens; the labels of the first fifth are ignored (-100)."""
    ids = torch.randint(0, vocab_size, (samples, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : length // 5] = -100
    return {"input_ids": ids, "labels": labels}


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with a large eps, so that the rounding of a gradient near zero does not become a full-size step."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def train_alone(
    model: nn.Module, batch: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Train one step in ``dtype``, with float32 master weights as DeepSpeed keeps them.

    Returns:
        By name: the loss as "the loss", the norm of all gradients as "the gradient norm", and every weight after the
        step.
    """
    model = copy.deepcopy(model).to(device, dtype).train()
    loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
    loss.backward()
    masters = {}
    for name, parameter in model.named_parameters():
        masters[name] = nn.Parameter(parameter.detach().float())
        masters[name].grad = None if parameter.grad is None else parameter.grad.float()
    norm = nn.utils.clip_grad_norm_(masters.values(), CLIP)
    optimizer_of(masters.values()).step()
    weights = {name: parameter.detach().cpu() for name, parameter in masters.items()}
    return {"the loss": loss.detach().float().cpu(), "the gradient norm": norm.detach().cpu(), **weights}


def compare_steps(
    step_tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[bool, str]:
    """Compare tensors of a step with those of one process, relative to the norms of the latter.

    Args:
        step_tensors: of this rank, by name; names of parameters that other ranks hold may be missing.
        expected: result of `train_alone`.

    Returns:
        Whether all differences are within `TOLERANCE`, and a text with the largest one.
    """
    errors = {}
    for name, tensor in step_tensors.items():
        difference = torch.linalg.vector_norm(tensor - expected[name])
        errors[name] = float(difference / torch.linalg.vector_norm(expected[name]))
    worst_name = max(errors, key=lambda name: torch.inf if math.isnan(errors[name]) else errors[name])
    tolerance_text = f"allowed {TOLERANCE[dtype]:.0e}"
    if not errors[worst_name] <= TOLERANCE[dtype]:  # NaN fails, too
        return False, f"{worst_name} is off by {errors[worst_name]:.1e}, {tolerance_text}"
    return True, f"loss, gradient norm, weights of one process to {errors[worst_name]:.0e}, {tolerance_text}"


def precision(dtype: torch.dtype) -> dict[str, object]:
    """Return the keys of ds_config.json that make DeepSpeed train in ``dtype``."""
    if dtype is torch.bfloat16:
        return {"bf16": {"enabled": True}}
    if dtype is torch.float16:
        # With a dynamic loss scale the first step may overflow, and DeepSpeed skips such a step.
        return {"fp16": {"enabled": True, "loss_scale": 64}}
    return {}


@contextmanager
def warnings_only() -> Iterator[None]:
    """Inside the context, suppress ds_hetero's log messages, which would stand between lines of the report."""
    logger = logging.getLogger("ds_hetero")
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    logger.setLevel(logging.INFO)  # at higher levels announcements are printed instead of logged
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagate
