"""Asymmetric gradient synchronization: replicas that cut their parameters differently train as one model.

`ds_hetero.sharding.gradient_chunks` says which ranks sum, own and hold what; here it moves. Both directions are
all-to-alls between the members of a bucket: every contributor sends every owner its chunks, and every owner sends every
holder their new values. That is what a ring reduce-scatter and a ring all-gather send, rank by rank, but parts may be
uneven, an owner need not hold anything, 16-bit gradients are added up in fp32 by their owner instead of rounded at
every hop, and weights are applied there.

Buckets start in one order on every rank, so that communicators which share ranks cannot wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ds_hetero.errors import SyncError
from ds_hetero.gradient_sync.agreement import agree, replicas_of
from ds_hetero.gradient_sync.bucket_transfer import BucketDtypes, BucketTransfer
from ds_hetero.gradient_sync.replica_weights import token_weights
from ds_hetero.gradient_sync.shards import Shard, local_tensor
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.peers.board import default_group
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.sharding.buckets import Bucket, fuse
from ds_hetero.sharding.gradient_chunks import Box, Chunk, chunks_of
from ds_hetero.sharding.parameter_layouts import ParameterLayout
from ds_hetero.sharding.zero_partition import ALIGNMENT

_GATHERS_IN_FLIGHT = 4  # buckets whose new values are on their way at once


class AsymmetricGradientSync:
    """Adds up gradients over replicas that cut parameters differently, ZeRO-2 style, and returns updated parameters.

        sync = AsymmetricGradientSync(dict(model.named_parameters()), layouts)
        optimizer = torch.optim.AdamW(sync.owned.values())
        for batch in loader:
            sync.start(batch.num_tokens)  # where the loss is a mean over the replica's tokens
            model(batch).backward()       # buckets leave as their gradients come
            sync.finish()                 # owned values have their gradients
            optimizer.step()
            sync.gather()                 # model parameters have their new values

    Args:
        parameters: what this rank holds, by name; a 1-D shard where the flat elements are cut. Their ``grad`` is taken
            away as soon as it is packed.
        layouts: of every parameter that is synchronized, in the order in which the forward uses them; the same on every
            rank. Other parameters are left alone.
        group: a group of all ranks of the job; None for the default one.
        bucket_bytes: a bucket leaves once a contributor has so much for it.
        replicas: ranks of every replica, by which `start` weighs gradients; None if every layout has one cut for each
            replica, in the same order.
        groups: process groups made so far, to be used again; left out, all are made anew.
        communication_dtype: what gradients travel in; None for each parameter's own dtype.
        owner_weights: see `ds_hetero.sharding.gradient_chunks.chunks_of`; the same on every rank.
        alignment: see `ds_hetero.sharding.gradient_chunks.chunks_of`.

    Attributes:
        owned: by name, the 1-D fp32 values (fp64 for fp64 parameters) of what this rank owns of a parameter, with
            gradients after `finish`. Every element of the model has one owner. Give them to an optimizer, in as many
            parameter groups as wanted.
        owned_boxes: by name, which elements of the whole parameter those are, box after box in row-major order.
        bucket_bytes: as given.
        held: names of what this rank holds and synchronizes.
        reached: names of parameters whose gradients this rank has made in the step.

    Caller: every rank of the job, in the same order as whatever else makes process groups.
    Collectives: all_gathers of what must agree; one new_group per set of members that ``groups`` does not have; one
    all_to_all_single per bucket and
    direction, after which all replicas have the values of the first.

    Raises:
        SyncError: on every rank, when layouts or settings differ between ranks, or a rank's parameters are not those
            that its layouts say.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, ParameterLayout],
        group: ProcessGroup | None = None,
        bucket_bytes: int = 25 * 2**20,
        *,
        replicas: Sequence[Sequence[int]] | None = None,
        groups: ProcessGroups | None = None,
        communication_dtype: torch.dtype | None = None,
        owner_weights: Mapping[int, float] | None = None,
        alignment: int = ALIGNMENT,
    ) -> None:
        self._group = default_group() if group is None else group
        self._rank = dist.get_rank()
        self._message_device = message_device(self._group)
        shards = {name: Shard.of(layout, self._rank) for name, layout in layouts.items()}
        self._shards = {name: shard for name, shard in shards.items() if shard}
        given = None if replicas is None else tuple(tuple(sorted(ranks)) for ranks in replicas)
        settings = bucket_bytes, communication_dtype, sorted((owner_weights or {}).items()), alignment, given
        dtypes = agree(parameters, self._shards, layouts, settings, self._group, has_replicas=given is not None)
        self.shapes = {name: layout.shape for name, layout in layouts.items()}  # of the whole parameters, by name
        self._replicas = replicas_of(layouts) if given is None else given
        self._parameters = {name: parameters[name] for name in self._shards}
        self.held = tuple(self._parameters)

        # Last parameters first: a backward makes their gradients first, so that buckets fill and leave in this order.
        chunks: list[Chunk] = []
        for name in reversed(list(layouts)):
            chunks += chunks_of(name, layouts[name], alignment, owner_weights)
        self._device = next((parameter.device for parameter in self._parameters.values()), self._message_device)
        self.bucket_bytes = bucket_bytes
        self._own(chunks, layouts, dtypes)
        self._make_transfers(chunks, dtypes, communication_dtype, bucket_bytes, groups or ProcessGroups())
        self._accumulating = self._holds_back = False
        self._accumulated: dict[str, Tensor] = {}
        self._tokens: tuple[dist.Work, Tensor] | None
        self._reset()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
        ]

    def start(self, tokens: int) -> None:
        """Weigh this step's gradients by ``tokens`` instead of adding them. Raises `SyncError`: too late.

        For losses that are means over the tokens of their replica: the result is the gradient of the mean over all
        tokens. A replica without tokens counts nothing, whatever its gradients are. With gradient accumulation
        ``tokens`` are those of all micro-batches, by which each of their losses is divided.

        Args:
            tokens: of this rank's replica; the same on each of its ranks.

        Caller: every rank, before the backward whose gradients travel.
        Collectives: one all_gather of an integer, waited for when the first sum is made.
        """
        if self._packed:
            raise SyncError("start() weighs the gradients of a step, so call it before the backward that sends them.")
        own = torch.tensor([tokens], dtype=torch.int64, device=self._message_device)
        table = own.new_empty(dist.get_world_size(self._group))
        work = dist.all_gather(list(table.split_with_sizes([1] * len(table))), own, group=self._group, async_op=True)
        assert work is not None
        self._tokens = work, table

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the gradients of backwards inside add up, 16-bit ones in fp32; the next backward outside sends them."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let the buckets of the backward inside leave at the end, and not as their gradients come.

        For a rank that others wait for to go on with their backwards: on NCCL a bucket occupies the device until all
        its members have started it, so what they wait for has to be on its way by then.
        """
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False
        self._launch()

    def send_rest(self) -> None:
        """Send gradients of zeros for parameters that the backwards of the step did not reach; `finish` does so too.

        Caller: every rank, after the last backward of a step and before another collective of the group: a bucket that
        left in the backward on one rank and in `finish` on another would change places with it.
        Collectives: an all_to_all_single for every bucket that could not leave earlier.
        """
        for name, parameter in self._parameters.items():
            if name not in self._packed:
                self._pack(name, parameter)
        self._launch()

    def finish(self) -> None:
        """Wait until this rank has the gradients of all elements that it owns, and give them to ``owned``.

        A parameter that the backward did not reach has a gradient of zeros.

        Caller: every rank, once after the last backward of a step.
        Collectives: an all_to_all_single for every bucket that could not leave earlier.
        Sends: in all buckets of a step, `reduced_elements` of the communication dtype.

        Raises:
            SyncError: on every rank, when ranks of one replica were given different tokens.
            PeerError: another rank failed.
        """
        self.send_rest()
        self._replica_weights()
        while self._in_flight:
            self._add_up(self._in_flight.popleft())
        for name, parameter in self.owned.items():
            parameter.grad = self._sums.pop(name)
        self._reset()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy ``owned`` values, in the parameters' dtype, to all holders. Raises `PeerError`: another rank failed.

        Caller: every rank, once after the optimizer's step.
        Collectives: one all_to_all_single per bucket.
        Sends: `gathered_elements` of the parameters' dtype.
        """
        in_flight: deque[BucketTransfer] = deque()
        for transfer in self._gathers:
            if len(in_flight) == _GATHERS_IN_FLIGHT:
                self._unpack(in_flight.popleft())
            transfer.start_gather([self.owned[chunk.name][self._extents[chunk]] for chunk in transfer.owned])
            in_flight.append(transfer)
        while in_flight:
            self._unpack(in_flight.popleft())

    def grad_norm(self) -> float:
        """Return the norm of the whole model's gradient, elements counted once; after `finish`.

        Caller: every rank.
        Collectives: one all_reduce.
        """
        gradients = [parameter.grad for parameter in self.owned.values() if parameter.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in gradients:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        square = square.to(self._message_device)
        dist.all_reduce(square, group=self._group)
        return float(square.sqrt())

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _own(self, chunks: Collection[Chunk], names: Collection[str], dtypes: Mapping[str, torch.dtype]) -> None:
        """Make the values that this rank owns; its chunks of a parameter lie end to end."""
        self._extents: dict[Chunk, slice] = {}
        sizes: dict[str, int] = {}
        self.owned_boxes: dict[str, tuple[Box, ...]] = {}
        for chunk in chunks:
            if chunk.owner == self._rank:
                start = sizes.get(chunk.name, 0)
                sizes[chunk.name] = start + chunk.size
                self._extents[chunk] = slice(start, start + chunk.size)
                self.owned_boxes[chunk.name] = (*self.owned_boxes.get(chunk.name, ()), *chunk.boxes)
        self.owned: dict[str, nn.Parameter] = {}
        self._sums: dict[str, Tensor] = {}  # of the step, made as they come
        for name in names:
            if name in sizes:
                values = torch.zeros(sizes[name], dtype=_kept(dtypes[name]), device=self._device)
                self.owned[name] = nn.Parameter(values)

    def _make_transfers(
        self,
        chunks: list[Chunk],
        dtypes: Mapping[str, torch.dtype],
        communication_dtype: torch.dtype | None,
        bucket_bytes: int,
        made: ProcessGroups,
    ) -> None:
        """Make buckets and process groups, the same on every rank, and the transfers that this rank takes part in."""
        wires = {name: communication_dtype or dtype for name, dtype in dtypes.items()}
        reduce = _fuse(chunks, lambda chunk: chunk.contributors, wires, dtypes, bucket_bytes)
        # First layers first: the next forward runs in this order.
        gather = _fuse(chunks, lambda chunk: chunk.holders, dtypes, dtypes, bucket_bytes)[::-1]
        groups: dict[tuple[int, ...], ProcessGroup | None] = {tuple(range(dist.get_world_size())): self._group}
        pairs: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        for bucket in reduce:
            pairs.setdefault(bucket.members, set()).update(bucket.pairs())
        for bucket in gather:
            pairs.setdefault(bucket.members, set()).update((owner, holder) for holder, owner in bucket.pairs())
        for members in sorted(pairs):  # sorted: all ranks make the groups in one order, since making one is collective
            if members not in groups:
                groups[members] = made.of(members, "gradient sync") if len(members) > 1 else None
            # Ranks are connected here, not by the first all-to-all of a bucket: that starts in a hook of the backward,
            # where a stage could wait to be connected to one that waits for the gradient of this backward.
            group = groups[members]
            if group is not None:
                made.connections_of(group).make(pairs[members])

        def transfers(buckets: Sequence[Bucket]) -> list[BucketTransfer]:
            own = [bucket for bucket in buckets if self._rank in bucket.members]
            return [BucketTransfer(bucket, groups[bucket.members], self._rank, self._device) for bucket in own]

        self._reductions, self._gathers = transfers(reduce), transfers(gather)
        self._reductions_of: dict[str, list[BucketTransfer]] = {name: [] for name in self._shards}
        for transfer in self._reductions:
            for name in transfer.pieces:
                self._reductions_of[name].append(transfer)
        self._take_first_replica(transfers([_from_first_contributor(bucket) for bucket in reduce]))

    @torch.no_grad()
    def _take_first_replica(self, transfers: Sequence[BucketTransfer]) -> None:
        """Let every owner take the values of the first replica, and every holder those of the owners."""
        for transfer in transfers:
            for name in transfer.pieces:
                transfer.pack(name, local_tensor(self._parameters[name]), self._shards[name])
            transfer.start_reduce()
            for chunk, part in _by_chunk(transfer, transfer.reduced()[0]):
                self.owned[chunk.name][self._extents[chunk]] = part
        self.gather()

    def _reset(self) -> None:
        self._packed: set[str] = set()
        self.reached: set[str] = set()
        self._next = 0  # index of the reduction whose turn it is: those before it have left
        self._in_flight: deque[BucketTransfer] = deque()
        self._tokens = None
        self._weights: dict[int, float] | None = None

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Take the gradient that a backward has just made."""
        self.reached.add(name)
        if self._accumulating:
            self._accumulate(name, parameter)
            return
        if name in self._packed:
            raise SyncError(
                f"the gradient of {name} came twice in one step. Run all backwards of a step but the last under "
                "no_sync(), and call finish() after the last."
            )
        self._pack(name, parameter)
        self._launch()

    def _accumulate(self, name: str, parameter: nn.Parameter) -> None:
        """Add a 16-bit gradient to its sum in fp32; fp32 gradients add up in autograd."""
        if _kept(parameter.dtype) == parameter.dtype:
            return
        gradient = _local_gradient(parameter)
        assert gradient is not None
        if name in self._accumulated:
            self._accumulated[name].add_(gradient)
        else:
            self._accumulated[name] = gradient.float()
        parameter.grad = None

    @torch.no_grad()
    def _pack(self, name: str, parameter: nn.Parameter) -> None:
        """Copy the gradient of a step into its buckets, and free it."""
        gradient = _local_gradient(parameter)
        if name in self._accumulated:
            total = self._accumulated.pop(name)
            gradient = total if gradient is None else total.add_(gradient)
        for transfer in self._reductions_of[name]:
            transfer.pack(name, gradient, self._shards[name])
        parameter.grad = None
        self._packed.add(name)

    def _launch(self) -> None:
        """Start full buckets whose turn it is; add up those that have arrived.

        In turn, since members have to start the collectives of their common groups in one order.
        """
        if self._holds_back:
            return
        while self._next < len(self._reductions) and self._reductions[self._next].is_full:
            self._reductions[self._next].start_reduce()
            self._in_flight.append(self._reductions[self._next])
            self._next += 1
        while self._in_flight and self._in_flight[0].has_arrived() and self._knows_weights():
            self._add_up(self._in_flight.popleft())

    @torch.no_grad()
    def _add_up(self, transfer: BucketTransfer) -> None:
        """Add up the gradients of all sources for the chunks of a bucket that this rank owns."""
        weights = self._replica_weights()
        rows = transfer.reduced()
        if len(rows) == 1 and weights[transfer.sources[0]] == 1:
            total = rows[0].to(transfer.dtypes.kept)
        else:
            total = torch.zeros(rows.shape[1], dtype=transfer.dtypes.kept, device=rows.device)
            for rank, row in zip(transfer.sources, rows, strict=True):
                if weights[rank]:  # left out, not multiplied by 0: 0 times NaN is NaN
                    total.add_(row, alpha=weights[rank])
        for chunk, part in _by_chunk(transfer, total):
            owned = self.owned[chunk.name]
            if chunk.size == owned.numel():
                self._sums[chunk.name] = part
            else:
                if chunk.name not in self._sums:
                    self._sums[chunk.name] = torch.empty_like(owned)
                self._sums[chunk.name][self._extents[chunk]] = part

    def _knows_weights(self) -> bool:
        return self._weights is not None or self._tokens is None or self._tokens[0].is_completed()

    def _replica_weights(self) -> dict[int, float]:
        """Return the weight of every rank's gradients."""
        if self._weights is not None:
            return self._weights
        if self._tokens is None:
            self._weights = dict.fromkeys(chain.from_iterable(self._replicas), 1.0)
            return self._weights
        work, table = self._tokens
        with waiting_for_peers("waiting for the tokens of all replicas"):
            work.wait()
        self._weights = token_weights(table.tolist(), self._replicas)
        return self._weights

    def _unpack(self, transfer: BucketTransfer) -> None:
        """Copy the values of a bucket that has arrived into the parameters that this rank holds."""
        for name, box, values in transfer.gathered():
            self._shards[name].view(local_tensor(self._parameters[name]), box).copy_(values)


def _by_chunk(transfer: BucketTransfer, values: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield the chunks that this rank owns in a bucket, each with its part of ``values``."""
    parts = values.split_with_sizes([chunk.size for chunk in transfer.owned])
    return zip(transfer.owned, parts, strict=True)


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's gradient; that of a DTensor is cut as the parameter, since autograd may leave partial sums."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local_tensor(gradient)


def _fuse(
    chunks: Sequence[Chunk],
    contributors: Callable[[Chunk], tuple[int, ...]],
    wires: Mapping[str, torch.dtype],
    dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Fuse chunks into buckets; ``wires`` are the dtypes in which they travel, by name of the parameter."""
    bucket_dtypes = {name: BucketDtypes(wire, _kept(dtypes[name])) for name, wire in wires.items()}
    item_bytes = {name: wire.itemsize for name, wire in wires.items()}
    return fuse(chunks, contributors, bucket_dtypes, item_bytes, bucket_bytes)


def _from_first_contributor(bucket: Bucket) -> Bucket:
    """Return the same bucket, filled by one rank of the first replica alone, with values as their owner keeps them."""
    assert isinstance(bucket.dtypes, BucketDtypes)
    kept = bucket.dtypes.kept
    return replace(bucket, contributors=bucket.contributors[:1], dtypes=BucketDtypes(kept, kept))


def _kept(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which owners keep and add up values: fp32 for 16-bit parameters."""
    return torch.promote_types(dtype, torch.float32)
