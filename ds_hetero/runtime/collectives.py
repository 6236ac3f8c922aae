"""All-gather small messages, and raise an error on every rank if one rank fails.

A rank that finds a fault must not raise alone: the other ranks would wait for it in their next collective for ever.
`on_all_ranks` runs a function on every rank, and raises on every rank if the function has raised on any. A caller that
gathers bytes anyway sends its error in these bytes (`encode_failure`), and calls `raise_failures` with the errors of
all ranks.
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

# Integers in every all_gather of this module; one size, so that ranks in different phases meet and find out. 1,024
# bytes have room for the numbers that check a step of one micro-batch (`ds_hetero.runtime.step_checks`).
_ROW_WIDTH = 128
_MAX_PHASE_BYTES = 128  # of the description of a phase


def all_gather_bytes(
    numbers: Sequence[int], payload: bytes, group: ProcessGroup | None = None
) -> tuple[list[list[int]], list[bytes]]:
    """All-gather integers and bytes; return (integers, bytes) of all ranks, each by rank of ``group``.

    Args:
        numbers: at most 126, the same number of them on every rank.
        payload: bytes of any length.
        group: the ranks that take part; None for the whole job.

    Caller: every rank of ``group``, in the same phase of the job (`waiting_for_peers`).
    Collectives: one all_gather of 128 integers; another one of the longest payload, if a payload does not fit into
        the first. For the whole job they run on a separate process group (`messages_group`), so that they cannot meet
        another collective.

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
    return [row[2:] for row in rows], payloads


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
    """Return a random name, drawn by rank 0, for the entries of this start of the job in the key-value store.

    An earlier start, whose entries may still be in the store, had another name.

    Caller: every rank. Collectives: one broadcast.
    """
    name_number = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=message_device())
    dist.broadcast(name_number, 0)
    return f"{name_number.item():x}"


def timeout_of_job() -> timedelta:
    """Return the timeout of the default process group's collectives, which other groups get as well."""
    world = dist.group.WORLD
    assert world is not None
    timeout: timedelta = world._get_backend(message_device()).options._timeout
    return timeout


def _gather(row: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All-gather ``row`` to a table with one row per rank of ``group``, on the CPU."""
    row = row.to(message_device(group))
    table = row.new_empty(dist.get_world_size(group), row.numel())
    dist.all_gather(list(table.unbind()), row, group=group)
    return table.cpu()


def _gather_bytes(payload: bytes, sizes: Sequence[int], group: ProcessGroup) -> list[bytes]:
    """All-gather payloads of known sizes; returns them by rank of ``group``."""
    if not any(sizes):
        return [b""] * len(sizes)
    padded = torch.frombuffer(bytearray(payload.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    texts = _gather(padded, group).numpy()
    return [text[:size].tobytes() for text, size in zip(texts, sizes, strict=True)]


def _raise_different_phases(phase: str, group: ProcessGroup) -> NoReturn:
    """Raise a `StepError` on every rank that names the ranks in another phase than most."""
    state_prefix = "has left the loop over its batches and is " if own_calls.history().has_left else "is "
    ranks = dist.get_process_group_ranks(group)
    sizes = [_MAX_PHASE_BYTES] * len(ranks)
    texts = [text.rstrip(b"\0").decode() for text in _gather_bytes(f"{state_prefix}{phase}".encode(), sizes, group)]
    ranks_by_text = ranks_by_value(zip(ranks, texts, strict=True))
    most_common_text = min(ranks_by_text, key=lambda text: ("has left" in text, -len(ranks_by_text[text])))
    other_texts = []
    for text, ranks_of_text in ranks_by_text.items():
        if text != most_common_text:
            other_texts.append(f"{ranks_text(ranks_of_text)} {text}")
    raise StepError(
        f"{'; '.join(other_texts)}, while the other ranks are {most_common_text.removeprefix('is ')}. {REMEDY}"
    )


def on_all_ranks(compute: Callable[[], T], group: ProcessGroup | None = None, *, names_rank_0: bool = False) -> list[T]:
    """Run ``compute`` on every rank; return all results, by rank of ``group``, or raise one error on every rank.

    Args:
        compute: returns an object that pickle can save. It may run collectives only if it cannot fail before them.
        group: the ranks that take part; None for the whole job, which is one rank without `torch.distributed`.
        names_rank_0: whether the error names rank 0 if only rank 0 has failed. Set it if every rank does the same work,
            and not if rank 0 works for all ranks.

    Caller: every rank of ``group``.
    Collectives: one `all_gather_bytes`, after ``compute``.

    Raises:
        HeteroError: a rank raised such an error. The class is that of the first rank's, the text has all messages.
        PeerError: the errors of all ranks that failed are other exceptions.
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
    failures: dict[int, _Failure] = {}
    for rank, payload_of_rank, row in zip(ranks, payloads, rows, strict=True):
        if row == [1]:
            failures[rank] = _decode_failure(payload_of_rank)
    if failures:
        # Rank 0 reads files and searches schedules for all ranks, so its failure need not name the rank. But every rank
        # writes checkpoints.
        must_name_rank_0 = names_rank_0 or any(failure.rule is CheckpointError for failure in failures.values())
        raise _error_of(failures, unnamed=(ranks,) if must_name_rank_0 else (ranks, ranks[:1])) from own_error
    return [pickle.loads(payload) for payload in payloads]


def encode_failure(error: Exception) -> bytes:
    """Encode an error of this rank for `raise_failures` on the others."""
    return json.dumps([type(error).__name__, str(error)]).encode()


def raise_failures(failures: Mapping[int, bytes], own_error: Exception | None, what: str) -> None:
    """Raise on every rank if any rank failed; for callers that have gathered the failures themselves.

    Args:
        failures: `encode_failure` of every rank that failed, by global rank.
        own_error: this rank's error, which it raises unchanged.
        what: subject and verb for the message, such as "the batch could not be read"; " on rank 1: KeyError: 'x'"
            follows on the other ranks.

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
    """An error of one rank, as the other ranks receive it."""

    class_name: str
    message: str

    @property
    def rule(self) -> type[HeteroError] | None:
        """The error's class if it is one of `ds_hetero.errors`; None for any other error."""
        error_class = getattr(errors, self.class_name, None)
        return error_class if isinstance(error_class, type) and issubclass(error_class, HeteroError) else None

    def __str__(self) -> str:
        return self.message if self.rule is not None else f"{self.class_name}: {self.message}"


def _decode_failure(payload: bytes) -> _Failure:
    """Return the failure that `encode_failure` has encoded."""
    return _Failure(*json.loads(payload))


def _error_of(failures: Mapping[int, _Failure], unnamed: Sequence[Sequence[int]]) -> Exception:
    """Return one error for the failures of all ranks; equal failures are one line.

    Args:
        failures: by global rank.
        unnamed: lists of ranks; if exactly the ranks of a list share a failure, the text does not name them.
    """
    ranks_by_failure: dict[_Failure, list[int]] = {}
    for rank, failure in failures.items():
        ranks_by_failure.setdefault(failure, []).append(rank)
    lines = []
    for failure, ranks in ranks_by_failure.items():
        is_agreed = ranks in unnamed and failure.class_name == PeerError.__name__  # the message names ranks already
        if is_agreed or (ranks in unnamed and failure.rule is not None):
            lines.append(failure.message)
        else:
            lines.append(f"on rank {', '.join(map(str, ranks))}: {failure}")
    rules = [failure.rule for failure in ranks_by_failure if failure.rule is not None]
    return (rules[0] if rules else PeerError)("\n".join(lines))
