"""Make attention and MLP of transformers' layers the regions of `ds_hetero.runtime.shared_tokens`.

Outside of a stage's layers every rank of a tensor group has all tokens of the group; between the layers' regions it has
a part of them:

    all tokens  --first layer-->  part  --attention, MLP, ... of every layer-->  part  --last layer-->  all tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ds_hetero.errors import ModelError
from ds_hetero.runtime.shared_tokens import copies_of_parts, enter_region, leave_region, part_of_copies

_HIDDEN = "hidden_states"  # argument of layers, attention and MLP in transformers
_POSITIONS = "position_ids"  # argument of layers


class ParallelRegions:
    """Shares the tokens of a tensor group between its ranks, outside of attention and MLP.

    Args:
        group: of the ranks of the tensor group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._num_tokens = 0  # of the group, in the layer that runs
        self._ends: list[RemovableHandle] = []  # hooks of the first and the last layer
        self._wrapped = WeakSet[nn.Module]()  # layers; a re-plan may bring back a layer that has left this rank

    def share_between(self, first_layer: nn.Module, last_layer: nn.Module) -> None:
        """Share the tokens from the input of one layer to the output of another one, and no longer between others."""
        for hook in self._ends:
            hook.remove()
        self._ends = [
            first_layer.register_forward_pre_hook(self._share, with_kwargs=True, prepend=True),
            last_layer.register_forward_hook(self._unshare),
        ]

    def wrap_layer(self, layer: nn.Module) -> None:
        """Make the children of a layer that have sharded weights regions."""
        if layer in self._wrapped:
            return
        self._wrapped.add(layer)
        # A hook of the layer also runs when the layer is recomputed, amid a backward of another micro-batch.
        layer.register_forward_pre_hook(self._read_tokens, with_kwargs=True)
        for region in regions_of(layer):
            self._wrap(region)

    def _wrap(self, region: nn.Module) -> None:
        run = region.forward

        def run_on_all_tokens(*args: Any, **kwargs: Any) -> Any:
            part = args[0] if args else kwargs[_HIDDEN]
            hidden = enter_region(part, self._num_tokens, self._group)
            output = run(hidden, *args[1:], **kwargs) if args else run(**{**kwargs, _HIDDEN: hidden})
            if isinstance(output, tuple):
                return leave_region(output[0], self._group), *output[1:]
            return leave_region(output, self._group)

        region.forward = run_on_all_tokens

    def _read_tokens(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get(_POSITIONS)
        if positions is None:
            raise ModelError(
                f"{type(layer).__name__} is called without {_POSITIONS}, from which the ranks of a tensor group know "
                'how many tokens they share. Use "inner": "sequence" without "tensor_size".'
            )
        self._num_tokens = positions.shape[-1]

    def _share(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs[_HIDDEN]
        part = part_of_copies(hidden, self._group)
        return ((part, *args[1:]), kwargs) if args else (args, {**kwargs, _HIDDEN: part})

    def _unshare(self, layer: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return copies_of_parts(output[0], self._num_tokens, self._group), *output[1:]
        return copies_of_parts(output, self._num_tokens, self._group)


def regions_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a layer that have sharded weights."""
    for child in layer.children():
        if any(isinstance(parameter, DTensor) for parameter in child.parameters()):
            yield child


def partial_in_regions(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a layer of whose gradient each rank of a tensor group computes a summand.

    These are all that are not sharded: a norm between regions sees the rank's tokens, one inside of a region the rank's
    heads, and the bias of a layer that is sharded by rows is added by one rank.
    """
    for parameter in layer.parameters():
        if not isinstance(parameter, DTensor):
            yield parameter
