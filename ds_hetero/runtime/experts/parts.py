"""The experts that this rank holds of every layer, and how they are hidden, gathered and loaded.

A module of experts has weights [experts of this rank, ...] under the names of the whole ones, and so have adapters on
experts. The ``state_dict`` would hold a part under the name of the whole, so it is refused outside of
`ExpertParts.gathered`; ``load_state_dict`` takes whole weights and keeps this rank's part, so a checkpoint of any
division can be loaded.

Dimension key: E experts of a layer, n some of them; in X elements of each.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.errors import ModelError
from ds_hetero.runtime.experts.replicas import ReplicaExperts, sum_over_replicas
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.section import SECTION
from ds_hetero.values.splits import Split

WHOLE_SHAPE = "ds_hetero_whole_shape"
"""Attribute of a parameter of which this rank has a part: the shape of the whole, the same on every rank."""


@dataclass(frozen=True, eq=False)
class Holder:
    """A module all of whose own parameters have values for every expert of a layer.

    Attributes:
        name: of the module in the model.
        in_columns: where the values of an expert are, see `ExpertPart`.
    """

    module: nn.Module
    name: str
    in_columns: bool = False


class PlacedLayer(Protocol):
    """Experts of one layer that are divided among the ranks of a replica."""

    holders: list[Holder]  # their parameters have this rank's part, and know the shape of the whole: `WHOLE_SHAPE`
    experts: Split  # of each rank
    in_replicas: ReplicaExperts  # how this and other replicas divide them
    rows: list[int]  # that each of this rank's experts got in training, see `ExpertParts.take_rows`


@dataclass(frozen=True, eq=False)
class ExpertPart:
    """One parameter with values for every expert of a layer, of which this rank has those of its experts.

    Where the values of expert e are, of E experts:

        in_columns False    rows e * k to (e + 1) * k of [E * k, ...]; for weights k is 1
        in_columns True     columns e, E + e, 2 * E + e, ... of [..., k * E]

    Attributes:
        experts: of each rank; rank r has those of ``experts.ranges[r]``.
        whole_shape: of the parameter with all experts.
    """

    parameter: nn.Parameter
    experts: Split
    in_replicas: ReplicaExperts
    whole_shape: torch.Size
    in_columns: bool = False

    def by_expert(self, values: Tensor, num_experts: int) -> Tensor:
        """Return values of some experts with experts in the first dimension: as the parameter has them -> [n, ...]."""
        if self.in_columns:
            return values.reshape(math.prod(self.whole_shape) // self.experts.total, num_experts).t()
        rows = self.whole_shape[0] // self.experts.total  # of an expert
        return values if rows == 1 else values.reshape(num_experts, rows, *self.whole_shape[1:])

    def from_experts(self, values: Tensor) -> Tensor:
        """Return values as a parameter with these experts has them: [n, ...] -> shape of the parameter."""
        if self.in_columns:
            columns = self.whole_shape[-1] // self.experts.total * len(values)
            return values.t().reshape(*self.whole_shape[:-1], columns)
        return values.reshape(self.whole_shape[0] // self.experts.total * len(values), *self.whole_shape[1:])

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of a rank, of values of all experts."""
        start, stop = self.experts.ranges[rank]
        return self.from_experts(self.by_expert(whole, self.experts.total)[start:stop])


class ExpertParts:
    """All placed layers of a model.

    Args:
        group: the ranks of this replica, which divide the experts; the parts are in the order of its ranks.

    Attributes:
        parts: by name of the parameter in the model, in the same order on every rank.
        has_engine: whether an engine was built for the model.
    """

    def __init__(self, layers: Sequence[PlacedLayer], group: ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.has_engine = False
        self._layers = list(layers)
        self.parts: dict[str, ExpertPart] = {}
        # Inside `gathered`, whole weights by id of the parameter; None for one that ``state_dict`` leaves out.
        self._whole: dict[int, Tensor | None] | None = None
        for layer, holder in self._holders():
            for name, parameter in holder.module.named_parameters(recurse=False):
                whole_shape = torch.Size(getattr(parameter, WHOLE_SHAPE))
                part = ExpertPart(parameter, layer.experts, layer.in_replicas, whole_shape, holder.in_columns)
                self.parts[f"{holder.name}.{name}"] = part
            # torch writes an attribute into a hook, which methods do not allow.
            save, load = functools.partial(self._save_whole), functools.partial(self._load_part)
            holder.module.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
            holder.module.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]

    @property
    def modules(self) -> Iterator[nn.Module]:
        """The modules that have parts, and the modules inside them."""
        for _, holder in self._holders():
            yield from holder.module.modules()

    def _holders(self) -> Iterator[tuple[PlacedLayer, Holder]]:
        """Yield all modules that have parts, each with its layer."""
        for layer in self._layers:
            for holder in layer.holders:
                yield layer, holder

    @property
    def experts_by_rank(self) -> list[list[int]]:
        """Of each layer, the number of experts of every rank."""
        return [list(layer.experts.sizes) for layer in self._layers]

    @property
    def in_replicas(self) -> list[ReplicaExperts]:
        """Of each layer, the experts of every rank of every replica."""
        return [layer.in_replicas for layer in self._layers]

    def take_rows(self) -> list[list[int]]:
        """Return the rows that each of this rank's experts got since the last call, by layer."""
        rows = [layer.rows for layer in self._layers]
        for layer in self._layers:
            layer.rows = [0] * len(layer.rows)
        return rows

    @property
    def trained(self) -> Mapping[str, ExpertPart]:
        """The parts that need gradients, by name."""
        return {name: part for name, part in self.parts.items() if part.parameter.requires_grad}

    @property
    def num_replicas(self) -> int:
        """Replicas of the job, each of which has all experts."""
        return max(part.in_replicas.num_replicas for part in self.parts.values())

    @property
    def are_packed(self) -> bool:
        """Whether some experts are quantized, so that their values are not all in parameters."""
        return not all(part.parameter.is_floating_point() for part in self.parts.values())

    @property
    def are_saved(self) -> bool:
        """Whether this rank's experts are those that checkpoints are written from: of the replica of rank 0."""
        return 0 in dist.get_process_group_ranks(self.group)

    @torch.no_grad()
    def copy_from_first_replica(self) -> None:
        """Let all replicas have the weights of the replica of rank 0, as DeepSpeed does with other parameters.

        Caller: every rank of the world.
        Collectives: those of `sum_over_replicas` for each parameter.
        """
        if self.num_replicas == 1:
            return
        for part in self.parts.values():
            value = part.parameter.detach()
            first = value if self.are_saved else torch.zeros_like(value)
            part.parameter.copy_(self.sum_over_replicas(part, first))

    def sum_over_replicas(self, part: ExpertPart, values: Tensor) -> Tensor:
        """Return the sum of values like a parameter's over the replicas; see `sum_over_replicas`."""
        if part.in_replicas.num_replicas == 1:
            return values
        by_expert = part.by_expert(values, part.experts.sizes[self.rank])
        return part.from_experts(sum_over_replicas(by_expert, part.in_replicas))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside the context, let the model seem to have no experts, so that nothing reduces or sends their weights."""
        hidden: list[tuple[nn.Module, dict[str, Any]]] = []
        for _, holder in self._holders():
            hidden.append((holder.module, dict(holder.module._parameters)))
            holder.module._parameters.clear()
        try:
            yield
        finally:
            for module, parameters in hidden:
                module._parameters.update(parameters)

    @contextlib.contextmanager
    def gathered(self, *, frozen: bool = True) -> Iterator[None]:
        """Inside the context, let ``state_dict`` of rank 0 have whole experts, on the CPU, and that of others none.

        Args:
            frozen: whether experts that are not trained are gathered, too; if not, ``state_dict`` leaves them out.

        Caller: every rank of the world.
        Collectives: one all_to_all_single for each parameter, in the replica of rank 0. Rank 0's memory needs room for
            all that are gathered.
        """
        whole: dict[int, Tensor | None] = dict.fromkeys(id(part.parameter) for part in self.parts.values())
        for name, value in self.whole_weights(frozen=frozen):
            whole[id(self.parts[name].parameter)] = value
        self._whole = whole
        try:
            yield
        finally:
            self._whole = None

    def whole_weights(self, *, frozen: bool = True) -> Iterator[tuple[str, Tensor | None]]:
        """Yield name and whole weight, on the CPU, of one parameter after the other; None on ranks other than 0.

        Args:
            frozen: whether experts that are not trained count, too.

        Caller: every rank of the world, which has to take all.
        Collectives: one all_to_all_single for each parameter, in the replica of rank 0.

        Raises:
            ModelError: on every rank: experts are quantized, so that their values are not all in parameters.
        """
        for name, part in self.parts.items():
            if frozen and not part.parameter.is_floating_point():
                raise ModelError(
                    f"{name} is quantized, and its constants are not gathered. Save what is trained: "
                    "handle.gathered_experts(frozen=False), or engine.save_checkpoint(..., "
                    "exclude_frozen_parameters=True)."
                )
            if frozen or part.parameter.requires_grad:
                value = self._to_first_rank(part) if self.are_saved else None
                yield name, None if value is None or self.rank else value.cpu()

    def _to_first_rank(self, part: ExpertPart) -> Tensor:
        """Return the whole parameter on rank 0, an empty tensor on other ranks. Collectives: one all_to_all_single."""
        num_local = part.experts.sizes[self.rank]
        local = part.by_expert(part.parameter.detach(), num_local).contiguous()
        is_first = self.rank == 0
        receive = [size if is_first else 0 for size in part.experts.sizes]
        send = [num_local] + [0] * (len(part.experts.sizes) - 1)
        received = local.new_empty(sum(receive), *local.shape[1:])
        with waiting_for_peers("gathering experts"):
            dist.all_to_all_single(received, local, receive, send, group=self.group)
        return part.from_experts(received)

    def _save_whole(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
        """Hook of ``state_dict``: put whole weights in place of parts. Raises `ModelError`: none are gathered."""
        if self._whole is None:
            raise ModelError(
                f'"{SECTION}.experts" divides the experts among the ranks, so the state_dict of one rank has a part of '
                "them. Save with engine.save_checkpoint, accelerator.get_state_dict or save_model of the Trainer, or "
                "inside `with handle.gathered_experts():`, all of which every rank calls; rank 0 then has all experts."
            )
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in self._whole:
                continue
            whole = self._whole[id(parameter)]
            if whole is None:
                del state_dict[prefix + name]
            else:
                state_dict[prefix + name] = whole

    def _load_part(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        """Hook of ``load_state_dict``: keep this rank's part of whole weights."""
        by_id = {id(part.parameter): part for part in self.parts.values()}
        for name, parameter in module._parameters.items():
            value = state_dict.get(prefix + name)
            part = by_id.get(id(parameter))
            if part is not None and isinstance(value, Tensor) and value.shape == part.whole_shape:
                state_dict[prefix + name] = part.cut(value, self.rank)
