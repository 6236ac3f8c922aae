"""Describe the batch that one rank has, and compare the descriptions of the ranks of a replica.

Every rank sends a header of a few integers, and the same rules are applied to all headers on every rank.
"""

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
from ds_hetero.runtime.model_switches import (
    AUTOCAST,
    NO_GRADIENT,
    REQUIRES_GRAD,
    checksum_texts,
    differing_switch_error,
)
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement

Header = Mapping[str, int]  # the numbers of one rank, by the names in `_HEADER`
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
    """The arguments of a forward on one rank, as far as attention depends on them."""

    batch_size: int  # rows of the batch: B
    tokens: int  # tokens of one row on this rank: s
    dtype: torch.dtype  # the dtype in which attention will run
    position_ids: Tensor | None = None  # [B, s] or [1, s]
    attention_mask: Tensor | None = None  # [B, s]; non-zero where a token is real
    cu_seqlens: Tensor | None = None  # [documents + 1] boundaries in the flattened sequence, on every rank; B is 1
    placement: Placement | None = None  # for which the shard was cut, if known
    autocast: torch.dtype | None = None  # under which the forward runs
    trained: int = NO_GRADIENT  # `ds_hetero.runtime.model_switches.checksum_of_trained`

    @property
    def documents_from(self) -> str:
        """Name of the argument that shows the documents of the batch."""
        if self.cu_seqlens is not None:
            return BOUNDARIES
        return POSITIONS if self.attention_mask is None else MASK

    def header(self, device: torch.device) -> Tensor:
        """Return the numbers that every rank sends to the others, [10] in the order of `_HEADER`.

        They are computed on the device, so a rank waits for its device only when it reads the headers of all ranks.
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
        return torch.stack([_as_scalar_tensor(number, device) for number in row])


def _moment(numbers: Tensor) -> Tensor:
    """Return the sum of the numbers with the weights 1, 2, 3, ..."""
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device)
    return (numbers * weights.view(numbers.shape)).sum()


def _as_scalar_tensor(number: Tensor | int, device: torch.device) -> Tensor:
    """Return ``number`` as a tensor [] on ``device``, without a copy from the host that would make the host wait."""
    if isinstance(number, Tensor):
        return number.to(device)
    return torch.full((), number, dtype=torch.int64, device=device)  # nothing is copied from the host


def gather_headers(replica: Replica, local: LocalBatch) -> list[Header]:
    """Return the headers of all ranks of the replica; waits for the device, once per forward.

    Collectives: one all_gather.
    """
    rows = all_gather_in_replica(replica, local.header(message_device(replica.sp_group)))
    return [dict(zip(_HEADER, row, strict=True)) for row in rows.tolist()]


def all_gather_in_replica(replica: Replica, part: Tensor) -> Tensor:
    """Stack the tensors ``part`` of all ranks of the replica, all of one shape. Collectives: one all_gather."""
    parts = part.new_empty(len(replica.ranks), *part.shape)
    with waiting_for_peers("comparing the batch with the other ranks of its replica"):
        dist.all_gather(list(parts.unbind()), part, group=replica.sp_group)
    return parts


def expect_one_batch(replica: Replica, headers: Sequence[Header]) -> None:
    """Refuse shards of different batches. Raises `BatchError`, the same on every rank: how they differ."""
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
        is_present = [header[name] != ABSENT for header in headers]
        if len(set(is_present)) > 1:
            entry = "position_ids" if name == "position_sum" else "attention_mask"
            raise BatchError(
                f"{entry} must be given on all ranks or on none, but by rank it is {is_present}. Pass the "
                "same entries of the batch to the model on every rank."
            )


def expect_one_model(headers: Sequence[Header]) -> None:
    """Refuse a forward in which ranks train different parameters, or run under different autocast.

    The messages of such a forward, and of its backward, would have unlike sizes.

    Raises:
        ModelError: which switch differs, by rank of the replica; the same on every rank.
    """
    autocast = [header["autocast"] for header in headers]
    if len(set(autocast)) > 1:
        raise differing_switch_error(
            AUTOCAST, ["off" if index == ABSENT else str(_DTYPES[index]) for index in autocast]
        )
    trained = [header["trained"] for header in headers]
    if len(set(trained)) > 1:
        raise differing_switch_error(REQUIRES_GRAD, checksum_texts(trained))
