"""One optimizer step of a small Llama under an uneven schedule, against the same step in one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import ds_hetero
from ds_hetero.common.extras import TRAINING, require
from ds_hetero.common.reading import JsonDict
from ds_hetero.errors import HeteroError
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session
from ds_hetero.selftest.uneven_schedules import NUM_HEADS, NUM_KV_HEADS, length_for, uneven_schedules

_TOLERANCE = 1e-4  # relative; sums of float32 in another order differ by less
_CLIP = 1.0
_TIMES = 4.0  # the limit of a call: DeepSpeed is imported, and the first batch is checked


def check_training(session: Session) -> Iterator[Line]:
    """One line per ZeRO stage."""
    try:
        require(*TRAINING, purpose="training")
    except HeteroError as error:
        yield Line("training step", "skip", str(error))
        return
    from ds_hetero.frameworks.transformers.model.facts import VOCAB_SIZE, small_llama

    length = length_for(session.size)
    with session.watch.call("one process trains", times=_TIMES):
        model = small_llama(NUM_HEADS, NUM_KV_HEADS, length)
        batch = _batch(length, VOCAB_SIZE)
        expected = _train_alone(copy.deepcopy(model).to(session.device), batch, session.device)
    for stage in (3,) if session.quick else (0, 1, 2, 3):
        name = f"training step, ZeRO-{stage}"
        with session.watch.call(name, times=_TIMES), warnings_only():
            try:
                problem = _compare(_train_on_ranks(copy.deepcopy(model), batch, stage, session), expected)
            except HeteroError as error:  # raised on all ranks
                problem = f"{type(error).__name__}: {error}"
        yield Line(name, "fail" if problem else "pass", problem or "loss, gradient norm, weights of one process")


def _batch(length: int, vocab_size: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : length // 5] = -100
    return {"input_ids": ids, "labels": labels}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose denominator does not turn the rounding of a gradient near zero into a step of full size."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _train_alone(model: nn.Module, batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    model.train()
    optimizer = _optimizer(model)
    loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    optimizer.step()
    weights = {name: p.detach().float().cpu() for name, p in model.named_parameters()}
    return {"the loss": loss.detach().cpu(), "the gradient norm": norm.detach().cpu(), **weights}


def _train_on_ranks(model: nn.Module, batch: Mapping[str, Tensor], stage: int, session: Session) -> dict[str, Tensor]:
    from ds_hetero.frameworks.deepspeed.small_job import train_one_step

    schedules = list(uneven_schedules(session.size).values())
    config: JsonDict = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": _CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "heterogeneity": {"schedule": schedules[-1].to_dict()},
    }
    model.train()
    step = train_one_step(ds_hetero.register(), model, _optimizer(model), batch, config)
    norm = {} if step.grad_norm is None else {"the gradient norm": torch.tensor(step.grad_norm)}
    return {"the loss": torch.tensor(step.loss), **norm, **step.parameters}


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """The tensor that differs most, beyond rounding."""
    errors = {
        name: float(torch.linalg.vector_norm(have - expected[name]) / torch.linalg.vector_norm(expected[name]))
        for name, have in found.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return None if errors[worst] <= _TOLERANCE else f"{worst} is off by {errors[worst]:.1e}, allowed {_TOLERANCE:.0e}"


@contextmanager
def warnings_only() -> Iterator[None]:
    """The announcements of a job are not for this table."""
    logger = logging.getLogger("ds_hetero")
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    logger.setLevel(logging.INFO)  # let through, so that nothing is printed instead
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagate
