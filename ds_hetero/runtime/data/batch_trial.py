"""Trials of how many samples a rank has memory for: forwards and backwards that leave nothing behind.

    trial = BatchTrial(model)                  # and ``trial.note(args, kwargs)`` before every forward of training
    rows = trial.most(12)                      # 12, or the most of them that did not run out of memory

No other rank takes part: a backward by `torch.autograd.grad` reaches no hook that reduces gradients. Parameters that a
forward gathers, as by ZeRO-3, need all ranks; there nothing can be tried.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator

import torch
from torch import nn

from ds_hetero.runtime.data.loss_units import Batch, loss_in, num_rows, take_rows, tensors_in
from ds_hetero.runtime.devices import default_device, possible_growth

logger = logging.getLogger(__name__)


class BatchTrial:
    """The longest sample that a model was given so far, and trials with it.

    Args:
        model: any module whose inputs have one row a sample.

    Attributes:
        is_running: a forward is a trial, and not of training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.is_running = model, False
        self._inputs: tuple[Batch, int] | None = None  # and their rows
        self._longest = 0.0
        self._autocast: tuple[str, torch.dtype | None] = "cpu", None

    def note(self, args: tuple[Batch, ...], kwargs: dict[str, Batch]) -> None:
        """Keep the arguments of a forward of training, if their samples are the longest so far."""
        rows, tensors = num_rows(kwargs, args), list(tensors_in((args, kwargs)))
        if not tensors or (length := sum(one.numel() for one in tensors) / rows) <= self._longest:
            return
        device = tensors[0].device.type
        self._autocast = device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._inputs, self._longest = ({"args": args, "kwargs": kwargs}, rows), length

    def most(self, rows: int, fewest: int = 1) -> int:
        """Return the most samples, ``fewest`` <= result <= ``rows``, that do not run out of memory; ``fewest`` fit."""
        if self._inputs is None or self._fits(rows):
            return rows
        while rows - fewest > 1:
            middle = (fewest + rows) // 2
            fewest, rows = (middle, rows) if self._fits(middle) else (fewest, middle)
        return fewest

    def _fits(self, rows: int) -> bool:
        assert self._inputs is not None
        batch, present = self._inputs
        ran_out = False
        with self._leaving_nothing():
            try:
                self._run(take_rows(batch, [row % present for row in range(rows)], present))
            except torch.OutOfMemoryError:
                ran_out = True
            except Exception:  # a model that is not to be run so; what fits is not known
                logger.warning("whether a batch of %d samples fits could not be tried", rows, exc_info=True)
        ran_out |= possible_growth(default_device()) < 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return not ran_out

    def _run(self, batch: Batch) -> None:
        device, dtype = self._autocast
        with torch.autocast(device, dtype, enabled=dtype is not None):
            outputs = self._model(*batch["args"], **batch["kwargs"])
        loss = loss_in(outputs)
        ends = [one for one in ([loss] if loss is not None else tensors_in(outputs)) if one.requires_grad]
        wanted = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        torch.autograd.grad(ends, wanted, [torch.ones_like(one) for one in ends], allow_unused=True)

    @contextlib.contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Put buffers and random states back afterwards; peaks of memory begin anew."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        self.is_running = True
        try:
            with torch.random.fork_rng(devices), torch.enable_grad():
                yield
        finally:
            self.is_running = False
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
