"""Records a real rank's step on a CPU, as `benchmarks.fake_gpu.recorder` does of a GPU that does not exist.

A block of attention is one operation, whatever tiles the kernel makes of it: so it is profiled.
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
from ds_hetero.cost.played import ATTENTION, CAUSAL, Operation
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
    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self._events, self._inside = events, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._inside or func.namespace == "c10d":
            return made
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        outputs = [x for x in tree_flatten(made)[0] if isinstance(x, Tensor)]
        name = func._schema.name.partition("::")[2]
        if is_launched(func, name, inputs, outputs):
            formula = flop_registry.get(func._overloadpacket)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=made))
            moved = moved_bytes(name, inputs, outputs)
            work = work_of(name, flops, inputs, args)
            self._events.append(Operation(name, "model", False, work.kind, work.flops, moved, *work[2:]))
        return made

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel's forward that is one operation."""

        def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> Any:
            return self._attend(lambda: original(q, k, v, scores, band), (q, k, v), band, backward=False)

        return attend

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel's backward that is one operation."""

        def attend(dout: Tensor, saved: SavedForward, scores: Scores, band: Band) -> Any:
            given = saved.q, saved.k, saved.v
            return self._attend(lambda: original(dout, saved, scores, band), given, band, backward=True)

        return attend

    def _attend(self, run: Callable[[], Any], given: tuple[Tensor, ...], band: Band, *, backward: bool) -> Any:
        q, k, _ = given
        pairs = band.pairs(q.shape[2], k.shape[2])
        rows = q.numel() // q.shape[3]
        flops = (10 if backward else 4) * q.shape[0] * q.shape[1] * q.shape[3] * pairs
        if flops:
            kind = ATTENTION if pairs == q.shape[2] * k.shape[2] else CAUSAL
            moved = sum(x.numel() * x.element_size() for x in given)
            sizes = rows, k.shape[2], q.shape[3]
            self._events.append(Operation("attention", "attention", backward, kind, flops, moved, *sizes))
        before, self._inside = self._inside, True
        try:
            return run()
        finally:
            self._inside = before
