"""Record a real rank's step on a CPU, as `benchmarks.fake_gpu.recorder` records a GPU that does not exist.

A block of attention is one operation, whatever tiles the kernel divides it into, because profiles time whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from benchmarks.fake_gpu.recorder import is_launched, moved_bytes, work_of
from benchmarks.proof.recording import recording
from ds_hetero.batch.tiles import Band
from ds_hetero.cost.replay import ATTENTION, CAUSAL, Operation
from ds_hetero.runtime.attention.kernels import SavedForward, Scores, torch_native


@contextmanager
def recording_live() -> Iterator[list[Any]]:
    """Record what this rank computes, posts and waits for inside."""
    with recording() as events, _LiveRecorder(events) as recorder:
        forward, backward = torch_native._CPU
        wrapped = torch_native._Operators(recorder.forward(forward), recorder.backward(backward))
        with mock.patch.object(torch_native, "_CPU", wrapped):
            yield events


class _LiveRecorder(TorchDispatchMode):
    """Records operators and blocks of attention."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self._events, self._inside = events, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._inside or func.namespace == "c10d":
            return result
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        outputs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        name = func._schema.name.partition("::")[2]
        if is_launched(func, name, inputs, outputs):
            formula = flop_registry.get(func._overloadpacket)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            num_moved_bytes = moved_bytes(name, inputs, outputs)
            work = work_of(name, flops, inputs, args)
            self._events.append(Operation(name, "model", False, work.kind, work.flops, num_moved_bytes, *work[2:]))
        return result

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel's forward that is recorded as one operation."""

        def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> Any:
            return self._attend(lambda: original(q, k, v, scores, band), (q, k, v), band, backward=False)

        return attend

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel's backward that is recorded as one operation."""

        def attend(dout: Tensor, saved: SavedForward, scores: Scores, band: Band) -> Any:
            inputs_of_call = saved.q, saved.k, saved.v
            return self._attend(lambda: original(dout, saved, scores, band), inputs_of_call, band, backward=True)

        return attend

    def _attend(self, run: Callable[[], Any], inputs_of_call: tuple[Tensor, ...], band: Band, *, backward: bool) -> Any:
        """Run a pass of a kernel and record it."""
        q, k, _ = inputs_of_call
        pairs = band.pairs(q.shape[2], k.shape[2])
        rows = q.numel() // q.shape[3]
        flops = (10 if backward else 4) * q.shape[0] * q.shape[1] * q.shape[3] * pairs
        if flops:
            kind = ATTENTION if pairs == q.shape[2] * k.shape[2] else CAUSAL
            num_moved_bytes = sum(x.numel() * x.element_size() for x in inputs_of_call)
            sizes = rows, k.shape[2], q.shape[3]
            self._events.append(Operation("attention", "attention", backward, kind, flops, num_moved_bytes, *sizes))
        before, self._inside = self._inside, True
        try:
            return run()
        finally:
            self._inside = before
