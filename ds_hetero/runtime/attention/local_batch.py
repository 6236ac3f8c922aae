"""A batch as one rank sees it, and the header by which the ranks of a replica compare it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import BatchError
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.documents import (
    BOUNDARIES,
    MASK,
    POSITIONS,
)
from ds_hetero.runtime.model_switches import AUTOCAST, NO_GRADIENT, REQUIRES_GRAD, by_checksum, unlike
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement

Header = Mapping[str, int]  # of one rank, by the names in `_HEADER`
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = (
    "batch_size",
    "tokens",
    "dtype",
    "position_sum",
    "position_moment",
    "padding",
    "cu_seqlens",
    "placement",
    "autocast",
    "trained",
)
ABSENT = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalBatch:
    """A batch as one rank sees it."""

    batch_size: int  # rows of the batch: B
    tokens: int  # tokens of one row that the rank holds: s
    dtype: torch.dtype  # the dtype in which attention will run
    position_ids: Tensor | None = None  # [B, s] or [1, s]
    attention_mask: Tensor | None = None  # [B, s]; non-zero where a token is real
    cu_seqlens: Tensor | None = None  # [documents + 1] boundaries in the flattened sequence, on every rank; B is 1
    placement: Placement | None = None  # for which the shard was cut, if that is known
    autocast: torch.dtype | None = None  # under which the forward runs
    trained: int = NO_GRADIENT  # `ds_hetero.runtime.model_switches.what_is_trained`

    @property
    def documents_from(self) -> str:
        """Name of the argument that the forward's documents would be read from."""
        if self.cu_seqlens is not None:
            return BOUNDARIES
        return POSITIONS if self.attention_mask is None else MASK

    def header(self, device: torch.device) -> Tensor:
        """Numbers that every rank sends to the others, ``[10]`` in the order of ``_HEADER``.

        They are made where they are needed, so that no rank waits for its device before it reads those of all.
        """
        position_sum: Tensor | int = ABSENT
        position_moment: Tensor | int = ABSENT
        padding: Tensor | int = ABSENT
        boundaries: Tensor | int = ABSENT
        if self.position_ids is not None:
            positions = self.position_ids.to(torch.int64).expand(self.batch_size, -1)
            position_sum, position_moment = positions.sum(), _moment(positions)
        if self.attention_mask is not None:
            padding = self.attention_mask.eq(0).sum()
        if self.cu_seqlens is not None:  # not below 0, since they ascend from 0
            boundaries = _moment(self.cu_seqlens.to(torch.int64))
        placement = ABSENT if self.placement is None else self.placement.fingerprint
        dtype = _DTYPES.index(self.dtype)
        autocast = ABSENT if self.autocast is None else _DTYPES.index(self.autocast)
        shapes = [self.batch_size, self.tokens, dtype]
        content = [position_sum, position_moment, padding, boundaries, placement]
        row = [*shapes, *content, autocast, self.trained]
        return torch.stack([_scalar(number, device) for number in row])


def _moment(numbers: Tensor) -> Tensor:
    """Numbers weighted by 1, 2, ... and added up."""
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device)
    return (numbers * weights.view(numbers.shape)).sum()


def _scalar(number: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device)
    return torch.full((), number, dtype=torch.int64, device=device)  # filled there: nothing is copied from the host


def gather_headers(replica: Replica, local: LocalBatch) -> list[Header]:
    """The headers of all ranks of the replica; waits for a GPU, once in a forward. Collectives: one all_gather."""
    rows = all_gather_in_replica(replica, local.header(message_device(replica.sp_group)))
    return [dict(zip(_HEADER, row, strict=True)) for row in rows.tolist()]


def all_gather_in_replica(replica: Replica, part: Tensor) -> Tensor:
    """Return one tensor of every rank, all of the same shape, one behind the other; one all_gather over the replica."""
    parts = part.new_empty(len(replica.ranks), *part.shape)
    with waiting_for_peers("comparing the batch with the other ranks of its replica"):
        dist.all_gather(list(parts.unbind()), part, group=replica.sp_group)
    return parts


def expect_one_batch(replica: Replica, headers: Sequence[Header]) -> None:
    """Refuse, by equal headers on every rank, shards of several batches. Raises `BatchError`: how they differ."""
    for name, show in (
        ("batch_size", int),
        ("dtype", lambda i: str(_DTYPES[i]).removeprefix("torch.")),
        ("cu_seqlens", lambda i: "absent" if i == ABSENT else f"{i & 0xFFFF:04x}"),
    ):
        values = [show(header[name]) for header in headers]
        if len(set(values)) > 1:
            raise BatchError(
                f"the ranks of a replica must hold shards of one batch, but {name} by rank is {values} "
                f"(ranks {replica.ranks}). Shard each batch with ds_hetero's loader, or give every rank the same one."
            )
    for name in ("position_sum", "padding"):
        given = [header[name] != ABSENT for header in headers]
        if len(set(given)) > 1:
            what = "position_ids" if name == "position_sum" else "attention_mask"
            raise BatchError(f"{what} must be given on all ranks or on none, but by rank it is {given}.")


def expect_one_model(headers: Sequence[Header]) -> None:
    """Refuse, by equal headers on every rank, a forward in which ranks train different parameters or round unlike.

    The messages of such a forward, and of its backward, would have unlike sizes.

    Raises:
        ModelError: which switch differs, by rank of the replica.
    """
    autocast = [header["autocast"] for header in headers]
    if len(set(autocast)) > 1:
        raise unlike(AUTOCAST, ["off" if index == ABSENT else str(_DTYPES[index]) for index in autocast])
    trained = [header["trained"] for header in headers]
    if len(set(trained)) > 1:
        raise unlike(REQUIRES_GRAD, by_checksum(trained))
