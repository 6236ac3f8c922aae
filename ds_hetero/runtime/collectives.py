"""Small messages between ranks: bytes for every rank, one way to fail together, and a clear error for a lost rank.

A rank that finds a fault must not raise alone: the others would wait for it in their next collective for ever.
`on_all_ranks` runs a function on every rank and raises everywhere if it raised anywhere. A caller that gathers bytes
anyway sends its error along with `encode_failure`, and calls `raise_failures` with what it received.
"""

from __future__ import annotations

import json
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, NoReturn, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_hetero import errors
from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.errors import CheckpointError, HeteroError, PeerError, StepError
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.peers.calls import REMEDY, own_calls
from ds_hetero.runtime.peers.watch import current_phase, current_watch, start_watch, waiting_for_peers

T = TypeVar("T")

# Integers in every all_gather of this module, so that ranks in different phases find out: 1,024 bytes, into which the
# numbers go by which a step of one micro-batch is checked (`ds_hetero.runtime.step_checks`).
_ROW_WIDTH = 128
_LONGEST_PHASE = 128  # bytes of its description


def all_gather_bytes(
    numbers: Sequence[int], payload: bytes, group: ProcessGroup | None = None
) -> tuple[list[list[int]], list[bytes]]:
    """Give every rank the integers and the bytes of every rank, by rank of ``group``.

    Args:
        numbers: at most 126, as many on every rank.
        group: the ranks that take part; None for the whole job.

    Caller: every rank of ``group``, in the same phase of the job (`waiting_for_peers`).
    Collectives: one all_gather of 128 integers; one more of the longest payload, if one does not fit into them. For the
        whole job they run on a process group of their own (`messages_group`), where nothing else can meet them.

    Raises:
        StepError: ranks are in different phases, such as the next batch and a checkpoint; on every rank.
        PeerError: a rank is gone.
    """
    group = messages_group() if group is None else group
    phase = current_phase()
    row = [crc32(phase.encode()), len(payload), *numbers]
    room = (_ROW_WIDTH - len(row)) * 8  # bytes behind the numbers
    has_room = len(payload) <= room
    with waiting_for_peers(phase):
        rest = torch.frombuffer(bytearray((payload if has_room else b"").ljust(room, b"\0")), dtype=torch.int64)
        table = _gather(torch.cat([torch.tensor(row, dtype=torch.int64), rest]), group)
        rows = table[:, : len(row)].tolist()
        if len({code for code, *_ in rows}) > 1:
            _raise_different_phases(phase, group)
        sizes = [size for _, size, *_ in rows]
        if max(sizes) <= room:
            texts = table[:, len(row) :].contiguous().view(torch.uint8).numpy()
            payloads = [text[:size].tobytes() for text, size in zip(texts, sizes, strict=True)]
        else:
            payloads = _gather_bytes(payload, sizes, group)
    return [of_rank[2:] for of_rank in rows], payloads


_messages_group: tuple[ProcessGroup, ProcessGroup] | None = None  # the default group, and ours of the same ranks


def messages_group() -> ProcessGroup:
    """Return the process group of all ranks for this module's messages; the first call makes it, on every rank."""
    global _messages_group
    world = dist.group.WORLD
    assert world is not None
    watch = current_watch()
    if watch is None or watch.group is not world:  # the first call, or the first one after a handle was undone
        start_watch(timeout_of_job().total_seconds(), _agreed_name())
    if _messages_group is None or _messages_group[0] is not world:
        _messages_group = world, dist.new_group(timeout=timeout_of_job())
    return _messages_group[1]


def _agreed_name() -> str:
    """A name that rank 0 draws, by which what these processes write is told from what those before a restart wrote."""
    drawn = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=message_device())
    dist.broadcast(drawn, 0)
    return f"{drawn.item():x}"


def timeout_of_job() -> timedelta:
    """Return the timeout of the default process group's collectives, for other groups."""
    world = dist.group.WORLD
    assert world is not None
    timeout: timedelta = world._get_backend(message_device()).options._timeout
    return timeout


def _gather(own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return every rank's ``own``, by rank of ``group``."""
    own = own.to(message_device(group))
    table = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(table.unbind()), own, group=group)
    return table.cpu()


def _gather_bytes(own: bytes, sizes: Sequence[int], group: ProcessGroup) -> list[bytes]:
    """Return every rank's ``own``, of known sizes, by rank of ``group``."""
    if not any(sizes):
        return [b""] * len(sizes)
    padded = torch.frombuffer(bytearray(own.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    texts = _gather(padded, group).numpy()
    return [text[:size].tobytes() for text, size in zip(texts, sizes, strict=True)]


def _raise_different_phases(phase: str, group: ProcessGroup) -> NoReturn:
    """Name the ranks that are in another phase than the others, on every rank; always raises `StepError`."""
    left = "has left the loop over its batches and is " if own_calls.history().has_left else "is "
    ranks = dist.get_process_group_ranks(group)
    sizes = [_LONGEST_PHASE] * len(ranks)
    did = [text.rstrip(b"\0").decode() for text in _gather_bytes(f"{left}{phase}".encode(), sizes, group)]
    by_phase = ranks_by_value(zip(ranks, did, strict=True))
    usual = min(by_phase, key=lambda text: ("has left" in text, -len(by_phase[text])))
    unusual = "; ".join(f"{ranks_text(of_phase)} {text}" for text, of_phase in by_phase.items() if text != usual)
    raise StepError(f"{unusual}, while the other ranks are {usual.removeprefix('is ')}. {REMEDY}")


def on_all_ranks(compute: Callable[[], T], group: ProcessGroup | None = None, *, names_rank_0: bool = False) -> list[T]:
    """Run ``compute`` on every rank; return all results, by rank of ``group``, or raise one error on every rank.

    Args:
        compute: returns what pickle can carry. It may run collectives only if it cannot fail before them.
        group: the ranks that take part; None for the whole job, which is one rank without `torch.distributed`.
        names_rank_0: whether a failure of rank 0 alone is its own, as it is for what every rank does for itself.

    Caller: every rank of ``group``.
    Collectives: one `all_gather_bytes`, after ``compute``.

    Raises:
        HeteroError: some rank broke a rule of ds_hetero's. It has the class of the first one and the messages of all.
        PeerError: ranks failed in other ways alone.
    """
    own_error: Exception | None = None
    if dist.is_initialized() and group is None:
        messages_group()  # before anything can fail
    try:
        result = compute()
        numbers, payload = [0], pickle.dumps(result)
    except Exception as error:
        own_error = error
        numbers, payload = [1], encode_failure(error)
    if not dist.is_initialized():
        rows, payloads, ranks = [numbers], [payload], [0]
    else:
        rows, payloads = all_gather_bytes(numbers, payload, group)
        ranks = dist.get_process_group_ranks(group)
    failures = {
        rank: _decode_failure(sent) for rank, sent, row in zip(ranks, payloads, rows, strict=True) if row == [1]
    }
    if failures:
        # Rank 0 alone reads files and searches schedules: its faults are the job's. But every rank writes checkpoints.
        by_any_rank = names_rank_0 or any(failure.rule is CheckpointError for failure in failures.values())
        raise _error_of(failures, unnamed=(ranks,) if by_any_rank else (ranks, ranks[:1])) from own_error
    return [pickle.loads(payload) for payload in payloads]


def encode_failure(error: Exception) -> bytes:
    """Encode an error of this rank for `raise_failures` on the others."""
    return json.dumps([type(error).__name__, str(error)]).encode()


def raise_failures(failures: Mapping[int, bytes], own_error: Exception | None, what: str) -> None:
    """Raise on every rank if any rank failed; for callers whose own all_gather carried the failures.

    Args:
        failures: `encode_failure` of every rank that failed, by global rank.
        own_error: this rank's own error, which it raises as it is.
        what: what failed, to complete "... on rank 1: KeyError: 'x'" on the other ranks.

    Raises:
        HeteroError: as `on_all_ranks`.
        PeerError: as `on_all_ranks`.
    """
    if own_error is not None:
        raise own_error
    if failures:
        error = _error_of({rank: _decode_failure(payload) for rank, payload in failures.items()}, unnamed=())
        raise PeerError(f"{what} {error}") if isinstance(error, PeerError) else error


class _Failure(NamedTuple):
    """An error of one rank as the other ranks receive it."""

    class_name: str
    message: str

    @property
    def rule(self) -> type[HeteroError] | None:
        """Return the class of the ds_hetero rule that was broken; None for any other error."""
        named = getattr(errors, self.class_name, None)
        return named if isinstance(named, type) and issubclass(named, HeteroError) else None

    def __str__(self) -> str:
        return self.message if self.rule is not None else f"{self.class_name}: {self.message}"


def _decode_failure(payload: bytes) -> _Failure:
    return _Failure(*json.loads(payload))


def _error_of(failures: Mapping[int, _Failure], unnamed: Sequence[Sequence[int]]) -> Exception:
    """Make one error of failures by global rank, equal ones together; ``unnamed``: sets of ranks not to be named."""
    ranks_by_failure: dict[_Failure, list[int]] = {}
    for rank, failure in failures.items():
        ranks_by_failure.setdefault(failure, []).append(rank)
    lines = []
    for failure, ranks in ranks_by_failure.items():
        is_agreed = ranks in unnamed and failure.class_name == PeerError.__name__  # it names its ranks already
        if is_agreed or (ranks in unnamed and failure.rule is not None):
            lines.append(failure.message)
        else:
            lines.append(f"on rank {', '.join(map(str, ranks))}: {failure}")
    rules = [failure.rule for failure in ranks_by_failure if failure.rule is not None]
    return (rules[0] if rules else PeerError)("\n".join(lines))
