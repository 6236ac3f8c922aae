"""Keep the results of attention over the recomputation of a checkpointed layer.

Checkpointing runs a piece of a model (a layer, as a rule) twice: in the forward, where autograd saves only its inputs,
and again in the backward. Attention is the costly part of it, and the only one with messages. So the first run records
what attention has computed and received, and the recomputation takes it from there:

    first run         every phase of attention (an exchange, a ring) runs, and its results are recorded in order
    recomputation     the same phases in the same order take these results: nothing is computed, nothing is sent

The record belongs to one run of one checkpointed piece, and its recomputation holds the only reference to it. So two
micro-batches, or two calls of one layer, cannot take each other's results, and the record of a forward without a
backward is freed with its graph. A phase gives its results away, unless the graph is retained for another backward.

    with a recomputation          the results lie
    in memory                     where the first run has left them; nothing is copied
    of offloaded checkpoints      in the host's memory; a copy there, and one back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hetero.errors import ModelError

Checkpoint = Callable[..., Any]  # ``torch.utils.checkpoint.checkpoint``, or a function around it


class _Kept(NamedTuple):
    """Results of one phase of attention."""

    inputs: str  # its name, and shapes and types of its inputs
    results: tuple[Tensor, ...]
    versions: tuple[int, ...]  # of the results when they were recorded: writing into them raises these
    device: torch.device  # to which the results go back


class _Record:
    """Results of the phases of attention in one run of a checkpointed piece, in order.

    Args:
        on_host: whether the results wait in the host's memory.
    """

    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host
        self._phases: list[_Kept | None] = []  # None: given away
        self._next: int | None = None  # the phase that a recomputation takes next; None in the first run
        self._has_run = False

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the checkpointed piece: the first call records, later calls are recomputations."""
        self._next = 0 if self._has_run else None
        self._has_run = True
        token = _record.set(self)
        try:
            return function(*args, **kwargs)
        finally:  # also where torch ends a recomputation early, by an exception
            _record.reset(token)

    def results(self, name: str, inputs: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the results of a phase: in the first run computed and recorded, in a recomputation those recorded."""
        described = _description(name, inputs)
        if self._next is None:
            computed = compute()
            self._phases.append(self._keep(described, inputs[0].device, computed))
            return computed
        kept = self._take(described)
        for result, version in zip(kept.results, kept.versions, strict=True):
            if result._version != version:
                raise ModelError(
                    f"the recomputation of a checkpointed layer takes a result of {described} from the layer's first "
                    f"run, but the model has written into it in place since. {_REMEDY}"
                )
        # Detached again: autograd makes the tensors that a forward returns part of the graph.
        return [result.detach().to(kept.device) for result in kept.results]

    def _keep(self, described: str, device: torch.device, results: Sequence[Tensor]) -> _Kept:
        # Detached, since tensors with a graph would hold the whole forward. They share storage and version.
        kept = tuple(_on_host(x) if self._on_host else x.detach() for x in results)
        return _Kept(described, kept, tuple(x._version for x in kept), device)

    def _take(self, described: str) -> _Kept:
        """Return what the next phase has recorded. Raises `ModelError`: the recomputation differs."""
        assert self._next is not None
        number, self._next = self._next, self._next + 1
        if number >= len(self._phases):
            raise ModelError(
                f"the recomputation of a checkpointed layer computes more attention than its first run: {described} is "
                f"phase {number + 1}, and the first run had {len(self._phases)}. {_REMEDY}"
            )
        kept = self._phases[number]
        if kept is None:
            raise ModelError(
                f"a checkpointed layer is computed again after a backward that ended its graph has taken {described}. "
                "Call that backward with retain_graph=True."
            )
        if kept.inputs != described:
            raise ModelError(
                f"the recomputation of a checkpointed layer computes other attention than its first run: phase "
                f"{number + 1} was {kept.inputs} and is now {described}. {_REMEDY}"
            )
        if not _graph_is_retained():
            self._phases[number] = None
        return kept


_REMEDY = 'Leave "keep_attention" out of the section for this model.'

_record: ContextVar[_Record | None] = ContextVar("_record", default=None)  # of the checkpointed piece that now runs


def keep_or_compute(name: str, inputs: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return the results of a phase of attention, which in a recomputation may be those of the first run.

    Args:
        name: of the phase, for errors.
        inputs: tensors that the phase reads; the shapes and types of both runs must agree.
        compute: computes the phase, with its messages.

    Caller: the forward of an autograd function.

    Raises:
        ModelError: a recomputation differs from its first run.
    """
    record = _record.get()
    return compute() if record is None else record.results(name, inputs, compute)


@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
def checkpoint_keeping_attention(
    checkpoint: Checkpoint, on_host: bool, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``checkpoint(function, *args, **kwargs)``, and keep the results of the attention in ``function``.

    Without gradients there is no recomputation, so nothing is kept.

    Args:
        checkpoint: torch's, reentrant or not, or a function around it.
        on_host: whether the results wait in the host's memory, as offloaded checkpoints do.
    """
    if not torch.is_grad_enabled():
        return checkpoint(function, *args, **kwargs)
    return checkpoint(partial(_Record(on_host=on_host).run, function), *args, **kwargs)


def _description(name: str, inputs: Sequence[Tensor]) -> str:
    shapes = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in inputs)
    return f"{name} of {shapes}"


def _on_host(x: Tensor) -> Tensor:
    """Copy a tensor to the host's memory, pinned if it comes from a GPU; strides stay."""
    if x.device.type == "cpu":
        return x.detach()
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def _graph_is_retained() -> bool:
    """Whether the backward that runs now keeps its graph, so that another one may follow; also outside a backward."""
    if torch._C._current_graph_task_id() == -1:
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
