"""Find how many samples of a batch a rank has memory for, by trial forwards and backwards that change nothing.

    trial = BatchTrial(model)                  # and ``trial.note(args, kwargs)`` before every forward of training
    rows = trial.max_samples(12)               # 12, or the largest number below that fits into memory

No other rank takes part: a backward by `torch.autograd.grad` does not run the hooks that reduce gradients. It cannot be
used where a forward gathers parameters from all ranks, as under ZeRO-3.
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
    """Keeps the inputs with the longest samples that a model got so far, and tries batches of them.

    Args:
        model: any module whose inputs have one row per sample.

    Attributes:
        is_running: the forward that runs is a trial, not one of training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.is_running = model, False
        self._inputs: tuple[Batch, int] | None = None  # the arguments with the longest samples, and their rows
        self._max_sample_numel = 0.0  # numbers in a sample of these
        self._autocast: tuple[str, torch.dtype | None] = "cpu", None

    def note(self, args: tuple[Batch, ...], kwargs: dict[str, Batch]) -> None:
        """Keep the arguments of a forward of training, if their samples are the longest so far."""
        rows, tensors = num_rows(kwargs, args), list(tensors_in((args, kwargs)))
        if not tensors:
            return
        sample_numel = sum(tensor.numel() for tensor in tensors) / rows
        if sample_numel <= self._max_sample_numel:
            return
        device = tensors[0].device.type
        self._autocast = device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._inputs, self._max_sample_numel = ({"args": args, "kwargs": kwargs}, rows), sample_numel

    def max_samples(self, rows: int, min_samples: int = 1) -> int:
        """Return the largest number of samples up to ``rows`` that fits into memory, by bisection.

        Args:
            min_samples: number of samples that is known to fit; the result is not smaller.
        """
        if self._inputs is None or self._fits(rows):
            return rows
        fitting, too_many = min_samples, rows
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            if self._fits(middle):
                fitting = middle
            else:
                too_many = middle
        return fitting

    def _fits(self, rows: int) -> bool:
        """Whether a forward and backward of ``rows`` samples stay below the usable memory of the device.

        If they fail for another reason than memory, that is not known: then only the peak of memory so far decides.
        """
        assert self._inputs is not None
        batch, num_rows_noted = self._inputs
        ran_out = False
        with self._restoring_state():
            try:
                self._run(take_rows(batch, [row % num_rows_noted for row in range(rows)], num_rows_noted))
            except torch.OutOfMemoryError:
                ran_out = True
            except Exception:  # the model does not accept such inputs, so what fits is not known
                logger.warning(
                    "a trial forward of %d samples failed, so ds_hetero assumes that they fit into memory",
                    rows,
                    exc_info=True,
                )
        ran_out |= possible_growth(default_device()) < 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return not ran_out

    def _run(self, batch: Batch) -> None:
        """Run a forward, and a backward from its loss, or from all outputs of a module without a loss."""
        device, dtype = self._autocast
        with torch.autocast(device, dtype, enabled=dtype is not None):
            outputs = self._model(*batch["args"], **batch["kwargs"])
        loss = loss_in(outputs)
        results = [loss] if loss is not None else list(tensors_in(outputs))
        differentiable = [tensor for tensor in results if tensor.requires_grad]
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        ones = [torch.ones_like(tensor) for tensor in differentiable]
        torch.autograd.grad(differentiable, parameters, ones, allow_unused=True)

    @contextlib.contextmanager
    def _restoring_state(self) -> Iterator[None]:
        """Restore the buffers of the model and the random states afterwards."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        self.is_running = True
        try:
            with torch.random.fork_rng(devices), torch.enable_grad():
                yield
        finally:
            self.is_running = False
            with torch.no_grad():
                for buffer, buffer_before in buffers:
                    buffer.copy_(buffer_before)
