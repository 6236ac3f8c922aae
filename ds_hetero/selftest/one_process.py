"""The step of one process, which those of all ranks are compared with."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

CLIP = 1.0

# Relative, by a tensor's norm. Sums of float32 in another order differ by less. In 16 bits gradients of tokens are
# rounded at other places in other blocks: on two CPU ranks, bfloat16, the worst tensor of a step is off by 2e-3, and by
# 3e-3 in pipelines (`ds-hetero selftest --quick`, whose lines say it). float16 has three bits more; never measured.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def batch_of(length: int, vocab_size: int, samples: int = 1) -> dict[str, Tensor]:
    """Return whole sequences, of whose first fifth no token is predicted."""
    ids = torch.randint(0, vocab_size, (samples, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : length // 5] = -100
    return {"input_ids": ids, "labels": labels}


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose denominator does not turn the rounding of a gradient near zero into a step of full size."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def train_alone(
    model: nn.Module, batch: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Loss, gradient norm and weights of a step in ``dtype`` with weights in float32, as DeepSpeed keeps them."""
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


def compare_steps(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[bool, str]:
    """Whether all tensors are those of one process; and how far the worst is off, for people."""
    errors = {
        name: float(torch.linalg.vector_norm(have - expected[name]) / torch.linalg.vector_norm(expected[name]))
        for name, have in found.items()
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else torch.inf)
    is_right, allowed = errors[worst] <= TOLERANCE[dtype], f"allowed {TOLERANCE[dtype]:.0e}"
    if not is_right:
        return False, f"{worst} is off by {errors[worst]:.1e}, {allowed}"
    return True, f"loss, gradient norm, weights of one process to {errors[worst]:.0e}, {allowed}"


def precision(dtype: torch.dtype) -> dict[str, object]:
    """Keys of ds_config.json."""
    if dtype is torch.bfloat16:
        return {"bf16": {"enabled": True}}
    # A fixed scale: a first step that overflows would be left out.
    return {"fp16": {"enabled": True, "loss_scale": 64}} if dtype is torch.float16 else {}


@contextmanager
def warnings_only() -> Iterator[None]:
    """Leave the announcements of a job out of this table."""
    logger = logging.getLogger("ds_hetero")
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    logger.setLevel(logging.INFO)  # let through, so that nothing is printed instead
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagate
