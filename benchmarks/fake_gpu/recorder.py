"""Record what a rank does on the device: launches, waits of the host, mixtures of devices, and bytes by cause.

Integer tensors of the device keep their numbers in a shadow on the CPU, as long as all tensors that they are computed
from have one: positions, masks, headers and counts are those of the batch, so that the engine decides as it would.

A wait of the host (a "sync") is a number read from the device, a copy between host and device that is not on pinned
memory with ``non_blocking``, and an operator whose output shape depends on numbers. torch's CUDA code waits for the
stream in each of these.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from benchmarks.fake_gpu.device import DEVICE_TYPE
from ds_hetero.batch.tiles import Band
from ds_hetero.cost import replay
from ds_hetero.cost.replay import ATTENTION, CAUSAL, MEMORY, PRODUCT, Operation
from ds_hetero.runtime.step_clock import Clock

_aten = torch.ops.aten
_BLOCK_BYTES = 512  # what CUDA's caching allocator rounds requests up to
_MOST_SHADOWED, _MOST_FLOATS = 1 << 21, 64
_READS_NUMBER = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_SHAPE_FROM_NUMBERS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "detach"}
_GATHERS = {"gather", "embedding", "index", "index_select"}  # read as much of their table as they return
_SCATTERS = {
    "scatter_add_",
    "scatter_",
    "index_put_",
    "index_add_",
}  # change as much of their first tensor as they take
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_NOT_ON_HOST = {"aten::histc"}  # of integers, which CUDA counts and the CPU does not
_AROUND_DISPATCH = ("/benchmarks/fake_gpu/recorder.py", "/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
_USES_ALONE = 2  # of the storage of a tensor that nothing but its operator has: by the tensor, and by who asks
_SKIPPED_FILES = ("/benchmarks/fake_gpu/", "/torch/", "/contextlib.py")


MESSAGE = "message"  # kind of the operation that posts one

# Operations a pair and element of a head, and the place of the queries among the arguments.
_FLASH = {"_flash_attention_forward": (4, 0), "_flash_attention_backward": (10, 1)}


class Work(NamedTuple):
    """The work of an operation; see `ds_hetero.cost.replay.Operation`."""

    kind: str = MEMORY
    flops: int = 0
    rows: int = 0
    keys: int = 0
    head_dim: int = 0


class Sync(NamedTuple):
    """A wait of the host.

    Args:
        name: of the operator.
        place: line of the code that waits.
        layer: decoder layer; None outside of layers.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
    """

    name: str
    place: str
    layer: int | None
    phase: str


@dataclass
class Record:
    """Record of one rank.

    Attributes:
        events: launches, messages and waits of the host, in order, and those that `benchmarks.proof.recording` adds if
        it
            records, too.
        syncs: waits of the host.
        mixtures: operators whose tensors were on several devices.
        held: bytes on the device now, by cause.
        total: bytes on the device now.
        resting: bytes before the step.
        peak: bytes at the peak.
        at_peak: bytes at the peak, by cause.
        allocated: bytes allocated so far, by cause.
    """

    events: list[Any] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    mixtures: list[str] = field(default_factory=list)
    held: Counter[str] = field(default_factory=Counter)
    total: int = 0
    resting: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    allocated: Counter[str] = field(default_factory=Counter)

    @property
    def operations(self) -> list[Operation]:
        """Launches, in order."""
        return [event for event in self.events if isinstance(event, Operation)]


class Recorder(TorchDispatchMode):
    """Records a rank's operations; entered inside the fake mode.

    Args:
        mode: the fake mode.

    Attributes:
        record: of this rank.
        cause: of the current launches.
        layer: decoder layer that runs.
        backward: whether a backward runs.
        in_step: whether the optimizer runs.
        replies: the ranks' answers in the next all_gather of integers of this shape.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode, self.record = mode, Record()
        self.cause, self.layer, self.backward, self.in_step = "other", None, False, False
        self._shadows = WeakTensorKeyDictionary()
        self._pinned = WeakTensorKeyDictionary()
        self._sizes: dict[int, tuple[int, str]] = {}  # of storages, with their cause
        self.replies: list[Tensor] | None = None

    def __enter__(self) -> Recorder:
        """Start recording; from here on fake tensors read all their numbers at once, like CUDA tensors."""
        self._former_tolist = FakeTensor.tolist
        FakeTensor.tolist = lambda tensor: self._list(tensor)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """See `__enter__`."""
        super().__exit__(*error)
        FakeTensor.tolist = self._former_tolist

    def _list(self, tensor: Tensor) -> Any:
        self._note_sync("tolist")
        shadow = self.numbers(tensor)
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist() if shadow is None else shadow.tolist()

    def begin_step(self) -> None:
        """Clear the record, except the bytes on the device."""
        record = self.record
        record.events.clear()
        record.syncs.clear()
        record.allocated.clear()
        record.peak, record.at_peak, record.resting = record.total, dict(record.held), record.total

    @contextmanager
    def inside(self, cause: str) -> Iterator[None]:
        """Set the cause of the launches inside."""
        before, self.cause = self.cause, cause
        try:
            yield
        finally:
            self.cause = before

    def keep(self, tensors: Iterator[Tensor] | list[Tensor], cause: str) -> None:
        """Count tensors that were made before the recording, or set their cause."""
        for tensor in tensors:
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == DEVICE_TYPE:
                self._hold(tensor, cause)

    def numbers(self, tensor: Tensor) -> Tensor | None:
        """Return the shadow of a tensor; None if its data were exchanged since, as ZeRO-3 does with parameters."""
        shadow: Tensor | None = self._shadows.get(tensor)
        return shadow if shadow is not None and shadow.shape == tensor.shape else None

    def give_numbers(self, tensor: Tensor, numbers: Tensor) -> None:
        """Set the shadow of a tensor."""
        self._shadows[tensor] = numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        target = kwargs.get("device")
        if not fakes and (target is None or torch.device(target).type != DEVICE_TYPE):
            return self._on_host(func, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if func in _READS_NUMBER:
            return self._read(func, name, args, kwargs)
        if not fakes and name == "_to_copy":
            return self._to_device(args[0], kwargs, name)
        if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
            return self._to_host(args[0], kwargs, name)
        on_host = [x for x in tensors if not isinstance(x, FakeTensor) and x.numel()]
        if on_host and name == "copy_":
            is_quick = kwargs.get("non_blocking", len(args) > 2 and args[2]) and on_host[0] in self._pinned
            self._note_sync(name, unless=is_quick)
        if on_host and name in _INDEXED:
            self._note_sync(name)
        return self._on_device(func, name, args, kwargs, tensors)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten.is_pinned.default:
            return args[0] in self._pinned
        if func is _aten._pin_memory.default:
            with unset_fake_temporarily():
                pinned = args[0].clone()
            self._pinned[pinned] = True
            return pinned
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _read(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operator that reads a number from the device, and record the sync."""
        self._note_sync(name)
        shadow = self.numbers(args[0])
        if shadow is not None:
            with unset_fake_temporarily():
                return func(shadow, *args[1:], **kwargs)
        if args[0].dtype == torch.bool:
            return False
        return 0.0 if args[0].dtype.is_floating_point else 0

    def _to_device(self, source: Tensor, kwargs: Any, name: str) -> Tensor:
        """Run a copy from the host, and record a sync unless it is asynchronous."""
        is_quick = kwargs.get("non_blocking", False) and source in self._pinned
        self._note_sync(name, unless=is_quick or not source.numel())
        dtype = kwargs.get("dtype") or source.dtype
        result = torch.empty(source.shape, dtype=dtype, device=kwargs["device"])
        self._record_launch(name, (source,), result, Work())
        with unset_fake_temporarily():
            if source.numel() <= (_MOST_FLOATS if dtype.is_floating_point else _MOST_SHADOWED):
                self._shadows[result] = source.detach().to(dtype)
        return result

    def _to_host(self, source: Tensor, kwargs: Any, name: str) -> Tensor:
        self._note_sync(name)
        shadow, dtype = self.numbers(source), kwargs.get("dtype") or source.dtype
        with unset_fake_temporarily():
            return torch.zeros(source.shape, dtype=dtype) if shadow is None else shadow.to(dtype)

    def _on_device(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an operator on the device, and record it."""
        if any(not isinstance(x, FakeTensor) for x in tensors):
            to_fake = lambda x: x if isinstance(x, FakeTensor) else self._mode.from_tensor(x)  # noqa: E731
            fake_args, fake_kwargs = tree_map_only(Tensor, to_fake, (args, kwargs))
        else:
            fake_args, fake_kwargs = args, kwargs
        shadows = self._shadow_run(func, args, kwargs, tensors)
        if name in _SHAPE_FROM_NUMBERS:
            self._note_sync(name)
            if shadows is None:
                raise RuntimeError(f"{name} of numbers that are not known, at {_place()}")
            result = tree_map_only(Tensor, lambda x: torch.empty_like(x, device=tensors[0].device), shadows)
        else:
            try:
                result = func(*fake_args, **fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                self._note_sync(name)
                raise
            except RuntimeError as error:
                if "device" in str(error).lower():
                    self.record.mixtures.append(f"{name} at {_place()}: {str(error)[:200]}")
                raise
        flops = self._flops(func, name, args, kwargs, result)
        self._record_launch(name, tensors, result, work_of(name, flops, tensors, args), func)
        self._keep_shadows(name, result, shadows, tensors, func)
        return result

    def _flops(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
        """Return the FLOPs of a matmul, or of an attention kernel over the pairs inside its window."""
        if name in _FLASH:
            per_pair, first = _FLASH[name]
            q, k, bounds_q, bounds_k = args[first], args[first + 1], *args[first + 3 + (first > 0) * 2 :][:2]
            return per_pair * q.shape[-1] * q.shape[-2] * self._pairs(q, k, (bounds_q, bounds_k), kwargs)
        count = flop_registry.get(func._overloadpacket)
        return 0 if count is None else int(count(*args, **kwargs, out_val=result))

    def _pairs(self, q: Tensor, k: Tensor, bounds: tuple[Tensor | None, Tensor | None], kwargs: Any) -> int:
        """Return the visible pairs of an attention kernel."""
        left, right = kwargs.get("window_size_left"), kwargs.get("window_size_right")
        if bounds[0] is None or bounds[1] is None:
            return q.shape[0] * _visible_pairs(q.shape[1], k.shape[1], left, right)
        with unset_fake_temporarily():
            starts = [self._shadows[x].tolist() for x in bounds]
        sizes = ([b - a for a, b in pairwise(of)] for of in starts)
        return sum(_visible_pairs(of_q, of_k, left, right) for of_q, of_k in zip(*sizes, strict=True))

    def _shadow_run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an operator on the shadows of its tensors, if all have one."""
        shadows = [x if not isinstance(x, FakeTensor) else self.numbers(x) for x in tensors]
        if any(x is None for x in shadows) or func.namespace == "c10d":
            return None
        if not tensors and (kwargs.get("dtype") is not None and kwargs["dtype"].is_floating_point):
            return None
        if func._schema.name in _NOT_ON_HOST:
            return None
        if not tensors and _size_of_factory(args) > _MOST_SHADOWED:
            return None
        numbers = iter(shadows)
        own_args, own_kwargs = tree_map_only(Tensor, lambda x: next(numbers), (args, kwargs))
        if "device" in own_kwargs:
            own_kwargs = {**own_kwargs, "device": torch.device("cpu")}
        with unset_fake_temporarily():
            return func(*own_args, **own_kwargs)

    def _keep_shadows(self, name: str, result: Any, shadows: Any, tensors: list[Tensor], func: Any) -> None:
        if func.namespace == "c10d":
            self._hear(name, tensors)
            return
        outputs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        if shadows is None:
            if func._schema.is_mutable:
                for x in outputs:
                    self._shadows.pop(x, None)
            return
        for x, numbers in zip(outputs, (x for x in tree_flatten(shadows)[0] if isinstance(x, Tensor)), strict=False):
            if numbers.numel() <= (_MOST_FLOATS if numbers.is_floating_point() else _MOST_SHADOWED):
                self._shadows[x] = numbers

    def _hear(self, name: str, tensors: list[Tensor]) -> None:
        """Set the numbers that other ranks send: from `replies` if there are any, otherwise this rank's own."""
        if not name.startswith(("allgather", "_allgather")):
            return
        *parts, local_tensor = tensors
        numbers = self.numbers(local_tensor)
        if numbers is None:
            return
        replies = None
        if self.replies and self.replies[0].shape == local_tensor.shape:
            replies, self.replies = self.replies, None
        with unset_fake_temporarily():
            if len(parts) == 1:  # into one tensor
                rows = replies or [numbers] * (parts[0].numel() // numbers.numel())
                self._write(parts[0], torch.cat([x.reshape(-1) for x in rows]))
            else:
                for i, part in enumerate(parts):
                    self._write(part, replies[i] if replies else numbers)

    def _write(self, tensor: Tensor, numbers: Tensor) -> None:
        """Write numbers to the shadow of a tensor, or of the tensor that it is a view of."""
        shadow = self.numbers(tensor)
        if shadow is None:
            self._shadows[tensor] = numbers.view(tensor.shape).clone()
        else:
            shadow.copy_(numbers.view(shadow.shape))

    def _record_launch(self, name: str, inputs: Any, result: Any, work: Work, func: Any = None) -> None:
        """Count a launch and its outputs."""
        outputs = [x for x in tree_flatten(result)[0] if isinstance(x, FakeTensor)]
        of_inputs = _storages(inputs)
        if func is _aten.add.Tensor and _is_sum_of_engine(inputs):
            self._replace(inputs[0], outputs[0])
        for x in outputs:
            if x.untyped_storage()._cdata not in of_inputs and x.fake_device.type == DEVICE_TYPE:
                self._hold(x, None)
        is_message = func is not None and func.namespace == "c10d"
        if not is_message and not is_launched(func, name, inputs, outputs):
            return
        num_moved_bytes = moved_bytes(name, [x for x in inputs if isinstance(x, Tensor)], outputs)
        work = work._replace(kind=MESSAGE) if is_message else work
        self.record.events.append(
            Operation(name, self.cause, self.backward, work.kind, work.flops, num_moved_bytes, *work[2:])
        )

    def _hold(self, tensor: Tensor, cause: str | None) -> None:
        """Count the bytes of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key, record = storage._cdata, self.record
        if key in self._sizes:
            if cause is not None and self._sizes[key][1] != cause:
                size, before = self._sizes[key]
                record.held[before] -= size
                record.held[cause] += size
                self._sizes[key] = size, cause
            return
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        if not size:
            return
        cause = cause or self.cause
        self._sizes[key] = size, cause
        record.held[cause] += size
        record.allocated[cause] += size
        record.total += size
        if record.total > record.peak:
            record.peak, record.at_peak = record.total, dict(record.held)
        weakref.finalize(storage, self._free, key)

    def _replace(self, taken: Tensor, by: Tensor) -> None:
        """Let a tensor take the place of another one that is no longer used."""
        key, storage = taken.untyped_storage()._cdata, by.untyped_storage()
        if key in self._sizes:
            self._sizes[storage._cdata] = self._sizes.pop(key)
            weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        if key not in self._sizes:  # replaced
            return
        size, cause = self._sizes.pop(key)
        self.record.held[cause] -= size
        self.record.total -= size

    def _note_sync(self, name: str, unless: bool = False) -> None:
        if not unless:
            phase = "step" if self.in_step else "backward" if self.backward else "forward"
            self.record.syncs.append(Sync(name, _place(), self.layer, phase))
            self.record.events.append(replay.Sync())


class RecordingClock(Clock):
    """Names the engine's phases for a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def phase(self, kind: str, name: str) -> AbstractContextManager[object]:
        """See `Clock`."""
        return self._recorder.inside(name)


def is_launched(func: Any, name: str, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> bool:
    """Return whether an operator launches a kernel: views, and tensors without numbers, do not.

    Args:
        func: the operator; None for a copy from the host.
        name: of the operator.
        inputs: its tensors, and other arguments.
        outputs: its results.
    """
    if func is not None and func.namespace == "fake_gpu":
        return True  # stands for a kernel, and may return nothing
    if name in _NO_LAUNCH or not any(x.numel() for x in outputs):
        return False
    input_storages = _storages(inputs)
    is_new = any(x.untyped_storage()._cdata not in input_storages for x in outputs)
    return func is None or is_new or bool(func._schema.is_mutable)


def _is_sum_of_engine(inputs: Sequence[Any]) -> bool:
    """Return whether an addition is autograd's sum of two gradients, which is in place unless tensors are fake."""
    first, frame = inputs[0], sys._getframe(1)
    if not isinstance(first, FakeTensor):
        return False
    while frame is not None and frame.f_code.co_filename.endswith(_AROUND_DISPATCH):
        frame = frame.f_back
    is_alone = torch._C._storage_Use_Count(first.untyped_storage()._cdata) == _USES_ALONE
    return is_alone and (frame is None or frame.f_code.co_name == "_engine_run_backward")


def _storages(values: Sequence[Any]) -> set[int]:
    return {x.untyped_storage()._cdata for x in values if isinstance(x, Tensor)}


def moved_bytes(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes: all of its tensors, but only the used rows of tables."""
    if name in _GATHERS:
        return 2 * sum(map(_bytes, outputs)) + sum(map(_bytes, inputs[1:]))
    if name in _SCATTERS:
        taken = sum(map(_bytes, inputs[1:]))
        return 2 * taken
    return sum(map(_bytes, (*inputs, *outputs)))


def work_of(name: str, flops: int, tensors: Sequence[Tensor], args: Any) -> Work:
    """Return the work of an operator from its name, FLOPs and tensors."""
    if not flops:
        return Work()
    if name in _FLASH:
        per_pair, first = _FLASH[name]
        q, k = args[first], args[first + 1]
        rows, keys, head_dim = q.numel() // q.shape[-1], k.numel() // (k.shape[-1] * k.shape[-2]), q.shape[-1]
        queries = rows // q.shape[-2]
        pairs = flops // (per_pair * head_dim * q.shape[-2])
        return Work(CAUSAL if 4 * pairs < 3 * queries * keys else ATTENTION, flops, rows, keys, head_dim)
    sizes = [size for x in tensors[-2:] for size in x.shape[-2:]]
    return Work(PRODUCT, flops, min(sizes, default=1))


def _visible_pairs(queries: int, keys: int, left: int | None, right: int | None) -> int:
    """Return the pairs inside a window of flash-attention; query i is at key i + keys - queries."""
    lo = keys - queries - (keys + queries if left is None or left < 0 else left)
    hi = keys - queries + (keys + queries if right is None or right < 0 else right)
    return Band(max(lo, -queries), min(hi, keys)).pairs(queries, keys)


def _size_of_factory(args: Any) -> int:
    """Return at least the number of elements that ``full(size, ...)`` or ``arange(stop)`` makes."""
    if args and isinstance(args[0], list | tuple):
        return prod(args[0])
    return max((int(x) for x in args if isinstance(x, int | float)), default=0)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _place() -> str:
    """Return the innermost line of code outside of torch and of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _SKIPPED_FILES):
            short = file.split("site-packages/")[-1].split("/ds_hetero/")[-1]
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"
