"""The experts that this rank holds of every layer, and how they are hidden, gathered and loaded.

A module of experts has weights [experts of this rank, ...] under the names of the whole ones. Its ``state_dict`` would
hold a part under the name of the whole, so it is refused outside of `ExpertParts.gathered`; ``load_state_dict`` takes
whole weights and keeps this rank's part, so a checkpoint of any division can be loaded.
"""

from __future__ import annotations

import contextlib
import functools
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


class PlacedLayer(Protocol):
    """Experts of one layer that are divided among the ranks of a replica."""

    module: nn.Module  # has this rank's part of every weight, and no submodule with weights
    name: str  # of the module in the model
    experts: Split  # of each rank
    in_replicas: ReplicaExperts  # how this and other replicas divide them
    rows: list[int]  # that each of this rank's experts got in training, see `ExpertParts.take_rows`


@dataclass(frozen=True, eq=False)
class ExpertPart:
    """One parameter of a layer's experts, of which this rank has ``experts.ranges[rank]`` along the first dimension."""

    parameter: nn.Parameter
    experts: Split
    in_replicas: ReplicaExperts


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
        self._whole: dict[int, Tensor] | None = None  # whole weights by id of the parameter, inside `gathered`
        for layer in layers:
            for name, parameter in layer.module.named_parameters():
                self.parts[f"{layer.name}.{name}"] = ExpertPart(parameter, layer.experts, layer.in_replicas)
            # torch writes an attribute into a hook, which methods do not allow.
            save, load = functools.partial(self._save_whole), functools.partial(self._load_part)
            layer.module.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
            layer.module.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]

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
            part.parameter.copy_(sum_over_replicas(first, part.in_replicas))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside the context, let the model seem to have no experts, so that nothing reduces or sends their weights."""
        hidden: list[tuple[nn.Module, dict[str, Any]]] = []
        for layer in self._layers:
            hidden.append((layer.module, dict(layer.module._parameters)))
            layer.module._parameters.clear()
        try:
            yield
        finally:
            for module, parameters in hidden:
                module._parameters.update(parameters)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside the context, let ``state_dict`` of rank 0 hold whole experts, on the CPU; others hold parts.

        Caller: every rank of the world.
        Collectives: one all_to_all_single for each parameter, in the replica of rank 0. Rank 0's memory needs room for
            all experts.
        """
        whole: dict[int, Tensor] = {}
        for part in self.parts.values() if self.are_saved else ():
            value = self._to_first_rank(part)
            if self.rank == 0:
                whole[id(part.parameter)] = value.cpu()
        self._whole = whole
        try:
            yield
        finally:
            self._whole = None

    def whole_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the whole of a parameter of experts inside `gathered`, on rank 0; None otherwise."""
        return None if self._whole is None else self._whole.get(id(parameter))

    def _to_first_rank(self, part: ExpertPart) -> Tensor:
        """Return the whole parameter on rank 0, an empty tensor on other ranks. Collectives: one all_to_all_single."""
        local = part.parameter.detach().contiguous()
        is_first = self.rank == 0
        receive = [size if is_first else 0 for size in part.experts.sizes]
        send = [local.shape[0]] + [0] * (len(part.experts.sizes) - 1)
        received = local.new_empty(sum(receive), *local.shape[1:])
        with waiting_for_peers("gathering experts"):
            dist.all_to_all_single(received, local, receive, send, group=self.group)
        return received

    def _save_whole(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
        """Hook of ``state_dict``: put whole weights in place of parts. Raises `ModelError`: none are gathered."""
        if self._whole is None:
            raise ModelError(
                f'"{SECTION}.experts" divides the experts among the ranks, so the state_dict of one rank has a part of '
                "them. Save with engine.save_checkpoint, accelerator.get_state_dict or save_model of the Trainer, or "
                "inside `with handle.gathered_experts():`, all of which every rank calls; rank 0 then has all experts."
            )
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in self._whole:
                state_dict[prefix + name] = self._whole[id(parameter)]

    def _load_part(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        """Hook of ``load_state_dict``: keep this rank's part of whole weights."""
        by_id = {id(part.parameter): part for part in self.parts.values()}
        for name, parameter in module._parameters.items():
            value = state_dict.get(prefix + name)
            part = by_id.get(id(parameter))
            if part is not None and isinstance(value, Tensor) and value.shape[:1] == torch.Size([part.experts.total]):
                start, stop = part.experts.ranges[self.rank]
                state_dict[prefix + name] = value[start:stop]
