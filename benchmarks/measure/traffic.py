"""Count the bytes that code sends to other ranks, at torch's communication operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Counts the payload that this rank sends while the mode is active.

    Every call of torch.distributed, also point-to-point, ends in an operator of the namespace ``c10d`` or
    ``_c10d_functional``. A dispatch mode sees each of them, of any caller, and on CPU also in the backward. DeepSpeed
    wraps its all-to-all in an operator of its own. Bytes that a rank sends to itself do not count.

    Args:
        sent_bytes: by operator.
        calls: by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a call, then run the operator."""
        if func.namespace in ("c10d", "_c10d_functional", "deepspeed"):
            name = func._schema.name.partition("::")[2].strip("_")
            if name in _SENT:
                self.calls[name] += 1
                self.sent_bytes[name] += _SENT[name](args)
            elif name not in _SILENT:
                raise NotImplementedError(f"how much does {func} send? Add it to benchmarks.measure.traffic.")
        return func(*args, **(kwargs or {}))


def _size(tensors: torch.Tensor | Sequence[torch.Tensor]) -> int:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return sum(x.numel() * x.element_size() for x in tensors)


def _to_others(x: torch.Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> int:
    total, here = _size(x), dist.get_rank(group)
    local_elements = total // group.size() if not splits else total // max(1, x.shape[0]) * splits[here]
    return total - local_elements


def _group(boxed: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(boxed)


def _named(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


_SENT = {
    "send": lambda a: _size(a[0]),
    "alltoall_base": lambda a: _to_others(a[1], a[4], _group(a[2])),
    "all_to_all_single": lambda a: _to_others(a[0], a[2], _named(a[3])),
    "dim_zero_all_to_all": lambda a: _to_others(a[0], (), _named(a[1])),
    "allgather": lambda a: _size(a[1]) * (_group(a[2]).size() - 1),
}
_SILENT = {"recv", "wait_tensor", "wrap_tensor_autograd", "barrier"}
