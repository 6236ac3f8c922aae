"""Asymmetric gradient synchronization: replicas that cut their parameters differently train as one model.

`ds_hetero.sharding.gradient_chunks` cuts parameters into chunks, each with its contributors, owner and holders; this
module sends the chunks. In a step the contributors of a bucket of chunks send gradients to the owners, which add them
up. After the optimizer's step the owners send the new values to all holders. Each direction is one all-to-all between
the members of a bucket. A rank sends as many bytes as in a ring reduce-scatter and a ring all-gather. But parts may be
uneven, an owner need not be a holder, and owners add 16-bit gradients up in fp32, where a ring rounds the sum at every
rank.

All ranks start the buckets in the same order, so that communicators which share ranks cannot wait for each other.
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
from ds_hetero.gradient_sync.agreement import compare_arguments, replicas_of
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

_MAX_GATHERS_IN_FLIGHT = 4  # buckets whose new values are on their way at once; chosen, never measured


class AsymmetricGradientSync:
    """Adds up gradients over replicas that cut parameters differently, ZeRO-2 style, and returns updated parameters.

        sync = AsymmetricGradientSync(dict(model.named_parameters()), layouts)
        optimizer = torch.optim.AdamW(sync.owned.values())
        for batch in loader:
            sync.start(batch.num_tokens)  # only for a loss that is a mean over the replica's tokens
            model(batch).backward()       # a bucket is sent as soon as all its gradients are made
            sync.finish()                 # afterwards the owned values have their gradients
            optimizer.step()
            sync.gather()                 # afterwards the model's parameters have their new values

    Args:
        parameters: parameters that this rank holds, by name; 1-D shards where the flat elements are cut. Their ``grad``
            is set to None as soon as it is copied into a bucket.
        layouts: layouts of all parameters to synchronize, in the order in which the forward uses them; the same on
            every rank. Parameters without a layout are left alone.
        group: a group of all ranks of the job; None for the default one.
        bucket_bytes: size of a bucket, in bytes that each contributor sends; the last parameter may exceed it.
        replicas: ranks of every replica, by which `start` weighs gradients; None if every layout has one cut for each
            replica, in the same order.
        groups: process groups that exist already and can be used again; None makes all of them anew.
        communication_dtype: dtype of gradients in messages; None for each parameter's own dtype.
        owner_weights: see `ds_hetero.sharding.gradient_chunks.chunks_of`; the same on every rank.
        alignment: see `ds_hetero.sharding.gradient_chunks.chunks_of`.

    Attributes:
        owned: the elements of every parameter that this rank owns, by the parameter's name: 1-D, in fp32 (fp64 for fp64
            parameters), with gradients after `finish`. Every element of the model has one owner. Give these tensors to
            an optimizer, in any parameter groups.
        owned_boxes: where the elements of ``owned`` are in the full parameter: boxes in their order, by name.
        bucket_bytes: the argument.
        parameter_names: names of the parameters that this rank holds and synchronizes.
        reached: names of parameters that a backward of this step has reached on this rank.
        shapes: shapes of the full parameters, by name.

    Caller: every rank of the job, in the same order as other calls that make process groups.
    Collectives: all_gathers, by which ranks compare their arguments; one new_group for each set of members that
        ``groups`` does not have; one all_to_all_single per bucket and direction, after which all replicas have the
        values of the first replica.

    Raises:
        SyncError: on every rank, when layouts or settings differ between ranks, or a rank's parameters do not have the
            names, shapes and dtypes of its layouts.
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
        named_replicas = None if replicas is None else tuple(tuple(sorted(ranks)) for ranks in replicas)
        settings = bucket_bytes, communication_dtype, sorted((owner_weights or {}).items()), alignment, named_replicas
        has_replicas = named_replicas is not None
        dtypes = compare_arguments(parameters, self._shards, layouts, settings, self._group, has_replicas=has_replicas)
        self.shapes = {name: layout.shape for name, layout in layouts.items()}
        self._replicas = replicas_of(layouts) if named_replicas is None else named_replicas
        self._parameters = {name: parameters[name] for name in self._shards}
        self.parameter_names = tuple(self._parameters)

        # Last parameters first: a backward makes their gradients first, so that buckets fill and leave in this order.
        chunks: list[Chunk] = []
        for name in reversed(list(layouts)):
            chunks += chunks_of(name, layouts[name], alignment, owner_weights)
        self._device = next((parameter.device for parameter in self._parameters.values()), self._message_device)
        self.bucket_bytes = bucket_bytes
        self._allocate_owned(chunks, layouts, dtypes)
        self._make_transfers(chunks, dtypes, communication_dtype, bucket_bytes, groups or ProcessGroups())
        self._is_accumulating = self._delays_sends = False
        self._accumulated: dict[str, Tensor] = {}
        self._tokens: tuple[dist.Work, Tensor] | None  # the gathering of every rank's tokens, and its result
        self._reset()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
        ]

    def start(self, tokens: int) -> None:
        """Take a mean of this step's gradients that is weighted by ``tokens``, instead of their sum.

        This is for losses that are means over the tokens of a replica: the result is the gradient of the mean over the
        tokens of all replicas. The gradients of a replica without tokens are left out. With gradient accumulation give
        the tokens of all micro-batches, and divide the loss of each micro-batch by this number.

        Args:
            tokens: tokens of this rank's replica; the same on each of its ranks.

        Caller: every rank, before the backward that sends gradients.
        Collectives: one all_gather of an integer, waited for when the first gradients are added up.

        Raises:
            SyncError: gradients of this step were sent already.
        """
        if self._packed:
            raise SyncError(
                "start() was called after a backward had sent gradients of this step, so it can no longer weigh them. "
                "Call start() before this backward."
            )
        local_tokens = torch.tensor([tokens], dtype=torch.int64, device=self._message_device)
        table = local_tokens.new_empty(dist.get_world_size(self._group))
        entries = list(table.split_with_sizes([1] * len(table)))
        work = dist.all_gather(entries, local_tokens, group=self._group, async_op=True)
        assert work is not None
        self._tokens = work, table

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of the backwards inside the context; the next backward outside of it sends the sums.

        16-bit gradients are accumulated in fp32.
        """
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Send the buckets of the backward inside the context at its end, not as soon as their gradients are made.

        This is for a stage whose input gradient other ranks need before they can run their own backwards. On NCCL a
        bucket occupies the device until all its members have started it, so the input gradient has to be sent first.
        """
        self._delays_sends = True
        try:
            yield
        finally:
            self._delays_sends = False
        self._launch()

    def send_rest(self) -> None:
        """Send the buckets that are not sent yet, with zeros for parameters that no backward of the step reached.

        `finish` does the same. Call this if another collective of the group comes before `finish`: some ranks send a
        bucket in the backward already, so the other ranks have to send it before that collective.

        Caller: every rank, after the last backward of a step.
        Collectives: an all_to_all_single for every bucket that is not sent yet.
        """
        for name, parameter in self._parameters.items():
            if name not in self._packed:
                self._pack(name, parameter)
        self._launch()

    def finish(self) -> None:
        """Wait for the gradients of all elements that this rank owns, and store them in ``owned``.

        A parameter that no backward reached has a gradient of zeros.

        Caller: every rank, once after the last backward of a step.
        Collectives: an all_to_all_single for every bucket that is not sent yet.
        Sends: in all buckets of a step, `reduced_elements` of the communication dtype.

        Raises:
            SyncError: on every rank, when ranks of one replica called `start` with different tokens.
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
        """Send the ``owned`` values, in the parameters' dtype, to all holders.

        Caller: every rank, once after the optimizer's step.
        Collectives: one all_to_all_single per bucket.
        Sends: `gathered_elements` of the parameters' dtype.

        Raises:
            PeerError: another rank failed.
        """
        in_flight: deque[BucketTransfer] = deque()
        for transfer in self._gathers:
            if len(in_flight) == _MAX_GATHERS_IN_FLIGHT:
                self._unpack(in_flight.popleft())
            transfer.start_gather([self.owned[chunk.name][self._extents[chunk]] for chunk in transfer.owned])
            in_flight.append(transfer)
        while in_flight:
            self._unpack(in_flight.popleft())

    def grad_norm(self) -> float:
        """Return the L2 norm of the gradient of all parameters of all replicas, each element counted once.

        Caller: every rank, after `finish`.
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
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _allocate_owned(
        self, chunks: Collection[Chunk], names: Collection[str], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Allocate ``owned``, in the order of ``names``; the owned chunks of a parameter lie end to end."""
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
        self._sums: dict[str, Tensor] = {}  # gradients of this rank's owned elements in this step, by name
        for name in names:
            if name in sizes:
                values = torch.zeros(sizes[name], dtype=_owner_dtype(dtypes[name]), device=self._device)
                self.owned[name] = nn.Parameter(values)

    def _make_transfers(
        self,
        chunks: list[Chunk],
        dtypes: Mapping[str, torch.dtype],
        communication_dtype: torch.dtype | None,
        bucket_bytes: int,
        existing_groups: ProcessGroups,
    ) -> None:
        """Make buckets and process groups, the same on every rank, and the transfers of which this rank is a member.

        Args:
            existing_groups: process groups that exist already; missing ones are added to it.
        """
        message_dtypes = {name: communication_dtype or dtype for name, dtype in dtypes.items()}
        reduce = _fuse(chunks, lambda chunk: chunk.contributors, message_dtypes, dtypes, bucket_bytes)
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
                groups[members] = existing_groups.of(members, "gradient sync") if len(members) > 1 else None
            # Ranks are connected here, not by the first all-to-all of a bucket: that starts in a hook of the backward,
            # where a stage could wait to be connected to one that waits for the gradient of this backward.
            group = groups[members]
            if group is not None:
                existing_groups.connections_of(group).make(pairs[members])

        def transfers(buckets: Sequence[Bucket]) -> list[BucketTransfer]:
            local_buckets = [bucket for bucket in buckets if self._rank in bucket.members]
            return [
                BucketTransfer(bucket, groups[bucket.members], self._rank, self._device) for bucket in local_buckets
            ]

        self._reductions, self._gathers = transfers(reduce), transfers(gather)
        self._reductions_of: dict[str, list[BucketTransfer]] = {name: [] for name in self._shards}
        for transfer in self._reductions:
            for name in transfer.pieces:
                self._reductions_of[name].append(transfer)
        self._broadcast_first_replica(transfers([_from_first_contributor(bucket) for bucket in reduce]))

    @torch.no_grad()
    def _broadcast_first_replica(self, transfers: Sequence[BucketTransfer]) -> None:
        """Copy the first replica's values to the owners, and from there to all holders: replicas start equal."""
        for transfer in transfers:
            for name in transfer.pieces:
                transfer.pack(name, local_tensor(self._parameters[name]), self._shards[name])
            transfer.start_reduce()
            for chunk, part in _by_chunk(transfer, transfer.reduced()[0]):
                self.owned[chunk.name][self._extents[chunk]] = part
        self.gather()

    def _reset(self) -> None:
        """Clear the state of a step."""
        self._packed: set[str] = set()  # names of parameters whose gradients are in their buckets
        self.reached: set[str] = set()
        self._next_reduction = 0  # index in ``_reductions`` of the bucket that starts next
        self._in_flight: deque[BucketTransfer] = deque()
        self._tokens = None
        self._weights: dict[int, float] | None = None

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Accumulate or send a gradient that a backward has just made; called by a hook.

        Raises:
            SyncError: a backward of this step has made a gradient of this parameter before.
        """
        self.reached.add(name)
        if self._is_accumulating:
            self._accumulate(name, parameter)
            return
        if name in self._packed:
            raise SyncError(
                f"two backwards have made a gradient of {name} in one step. Run all backwards of a step but the last "
                "under no_sync(), and call finish() after the last."
            )
        self._pack(name, parameter)
        self._launch()

    def _accumulate(self, name: str, parameter: nn.Parameter) -> None:
        """Add a 16-bit gradient to its sum in fp32; leave fp32 gradients in ``grad``, where autograd adds them up."""
        if _owner_dtype(parameter.dtype) == parameter.dtype:
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
        """Copy the gradient of a parameter, zeros if it has none, into its buckets, and free the gradient."""
        gradient = _local_gradient(parameter)
        if name in self._accumulated:
            total = self._accumulated.pop(name)
            gradient = total if gradient is None else total.add_(gradient)
        for transfer in self._reductions_of[name]:
            transfer.pack(name, gradient, self._shards[name])
        parameter.grad = None
        self._packed.add(name)

    def _launch(self) -> None:
        """Start the next buckets as long as they are full, and add up the buckets that have arrived.

        A full bucket waits until the bucket before it is full: ranks that share several communicators have to start the
        collectives of all of them in one order.
        """
        if self._delays_sends:
            return
        while self._next_reduction < len(self._reductions) and self._reductions[self._next_reduction].is_full:
            self._reductions[self._next_reduction].start_reduce()
            self._in_flight.append(self._reductions[self._next_reduction])
            self._next_reduction += 1
        while self._in_flight and self._in_flight[0].has_arrived() and self._knows_weights():
            self._add_up(self._in_flight.popleft())

    @torch.no_grad()
    def _add_up(self, transfer: BucketTransfer) -> None:
        """Wait for a bucket, and sum the gradients of this rank's owned chunks over the ranks that sent them."""
        weights = self._replica_weights()
        rows = transfer.reduced()
        if len(rows) == 1 and weights[transfer.sources[0]] == 1:
            total = rows[0].to(transfer.dtypes.owner)
        else:
            total = torch.zeros(rows.shape[1], dtype=transfer.dtypes.owner, device=rows.device)
            for rank, row in zip(transfer.sources, rows, strict=True):
                if weights[rank]:  # skip rows of weight 0: 0 times NaN is NaN
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
        """Return whether `_replica_weights` would return without waiting."""
        return self._weights is not None or self._tokens is None or self._tokens[0].is_completed()

    def _replica_weights(self) -> dict[int, float]:
        """Return the weight of every rank's gradients in this step: 1, or its share of tokens, see `start`."""
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
        """Wait for the values of a bucket, and copy them into the parameters that this rank holds."""
        for name, box, values in transfer.gathered():
            self._shards[name].view(local_tensor(self._parameters[name]), box).copy_(values)


def _by_chunk(transfer: BucketTransfer, values: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield the chunks that this rank owns in a bucket, each with its part of ``values``."""
    parts = values.split_with_sizes([chunk.size for chunk in transfer.owned])
    return zip(transfer.owned, parts, strict=True)


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of a gradient; None if there is none.

    A DTensor's gradient gets the parameter's placements, since autograd may leave it as partial sums.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local_tensor(gradient)


def _fuse(
    chunks: Sequence[Chunk],
    contributors: Callable[[Chunk], tuple[int, ...]],
    message_dtypes: Mapping[str, torch.dtype],
    dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Fuse chunks into buckets by `fuse`, which separates them by their dtypes in messages and at owners.

    Args:
        message_dtypes: dtypes in messages, by name of the parameter.
        dtypes: dtypes of the parameters, by name.
    """
    bucket_dtypes = {name: BucketDtypes(dtype, _owner_dtype(dtypes[name])) for name, dtype in message_dtypes.items()}
    item_bytes = {name: dtype.itemsize for name, dtype in message_dtypes.items()}
    return fuse(chunks, contributors, bucket_dtypes, item_bytes, bucket_bytes)


def _from_first_contributor(bucket: Bucket) -> Bucket:
    """Return a copy of the bucket to which only its first contributor contributes, in the dtype of the owners.

    At the start it carries that rank's parameters to their owners, so that all replicas begin with equal values.
    """
    assert isinstance(bucket.dtypes, BucketDtypes)
    dtype = bucket.dtypes.owner
    return replace(bucket, contributors=bucket.contributors[:1], dtypes=BucketDtypes(dtype, dtype))


def _owner_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which owners store values and add up gradients: fp32 for 16-bit parameters."""
    return torch.promote_types(dtype, torch.float32)
