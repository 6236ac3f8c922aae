"""Gradients of parameters on a piece of a batch, whole and sharded, by a random projection of each.

Outputs of modules and the gradients at them show a fault wherever it changes what tokens get. A layer that mixes tokens
and begins as zero (a convolution over neighbours, as Canon layers; the zero convolution of adapters) changes nothing at
first: outputs and gradients of all tokens are right, and its own gradient is not.

A run takes the gradient of a second leaf with the parameter's storage, which stands in the parameter's place in its
module. Hooks of any ZeRO stage, and of scripts, are the parameter's; none of them fires. On ZeRO-3 the leaf stands
there only while the module itself runs, between its gathering and its release, and keeps the gathered values alive
until the backward has ended.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hetero.frameworks.transformers.model.model_checks import containers_of_experts

# Elements, and so memory: 16 MiB of gradients in fp32 at every comparison, and 64 MiB by turns.
MOST_ELEMENTS = 1 << 22  # of parameters that are compared every time, smallest first
MOST_ELEMENTS_IN_TURN = 1 << 24  # of parameters that are compared by turns

NUM_SUMS = 16  # numbers of a projection; their root mean square varies by a sixth between random signs

# What ZeRO-3 reads of parameters that stand in modules. While a child is released: which of its parameters the modules
# that come next share with it (partitioned_param_coordinator.py, __params_to_release); a module that has parameters of
# its own and children stands changed then. In the backward of a linear layer: whether its weight is gathered
# (linear.py).
_READ_BY_ZERO_3 = ("ds_id", "ds_numel", "ds_status")


def compared_parameters(model: nn.Module, decoder: nn.Module, comparison: int) -> list[str]:
    """Names of trained parameters whose gradients are compared; the same on every rank.

    In a mixture of experts in half precision none is: rounding moves tokens between experts from run to run, and one
    token more is a tenth of a gradient of a piece.

    Args:
        model: before a check has changed ``requires_grad``.
        decoder: part of it whose parameters alone are compared; every rank runs all of what is outside.
        comparison: number of the comparison, from 0, by which large parameters take turns.
    """
    inside = {id(parameter) for parameter in decoder.parameters() if parameter.requires_grad}
    named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in inside}
    if containers_of_experts(model) and any(parameter.dtype.itemsize < 4 for parameter in named.values()):
        return []
    sizes = {name: int(getattr(one, "ds_numel", one.numel())) for name, one in named.items()}
    chosen: list[str] = []
    turns: list[list[str]] = []
    room, room_of_turn = MOST_ELEMENTS, 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        size = sizes[name]
        if size <= room:
            chosen.append(name)
            room -= size
            continue
        room = 0
        if size > MOST_ELEMENTS_IN_TURN:
            break
        if size > room_of_turn:
            turns.append([])
            room_of_turn = MOST_ELEMENTS_IN_TURN
        turns[-1].append(name)
        room_of_turn -= size
    return chosen + (turns[comparison % len(turns)] if turns else [])


class Leaves:
    """Second leaves of chosen parameters, during one run."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model = model
        by_name = dict(model.named_parameters())
        self._names = {id(by_name[name]): name for name in names}
        self._leaves: dict[str, nn.Parameter] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the leaves stand for the parameters inside."""
        hooks: list[RemovableHandle] = []
        replaced: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        try:
            for module in self._model.modules():
                own = {key: one for key, one in module._parameters.items() if id(one) in self._names}
                parameters = {key: one for key, one in own.items() if one is not None}
                if not parameters:
                    continue
                replaced.append((module, parameters))
                if any(hasattr(one, "ds_id") for one in parameters.values()):  # ZeRO-3
                    hooks.append(module.register_forward_pre_hook(self._replacing(parameters)))
                    # Before the hooks of ZeRO-3, which look at the module's parameters again.
                    after = _putting_back(parameters)
                    hooks.append(module.register_forward_hook(after, always_call=True, prepend=True))
                else:
                    self._replace(module, parameters)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, parameters in replaced:
                module._parameters.update(parameters)

    @property
    def leaves(self) -> Mapping[str, nn.Parameter]:
        """By name of a parameter, the leaf that stood for it."""
        return self._leaves

    def _replacing(self, parameters: Mapping[str, nn.Parameter]) -> Callable[..., None]:
        return lambda module, *_: self._replace(module, parameters)

    def _replace(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        for key, parameter in parameters.items():
            if parameter.numel() == 0:  # not gathered
                continue
            name = self._names[id(parameter)]
            if name not in self._leaves:
                self._leaves[name] = _leaf_of(parameter)
            module._parameters[key] = self._leaves[name]


def _leaf_of(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach())
    for name in _READ_BY_ZERO_3:
        if hasattr(parameter, name):
            setattr(leaf, name, getattr(parameter, name))
    return leaf


def project(name: str, gradient: Tensor) -> Tensor:
    """At most NUM_SUMS sums of the elements with random signs, every element in one of them; alike on every rank."""
    flat = gradient.detach().flatten()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, (flat.numel(),), generator=generator, dtype=torch.int8) * 2 - 1
    signed = flat.float() * signs.to(flat.device)
    padding = -flat.numel() % NUM_SUMS
    return nn.functional.pad(signed, (0, padding)).view(-1, NUM_SUMS).double().sum(0).cpu()


def _putting_back(parameters: Mapping[str, nn.Parameter]) -> Callable[..., None]:
    def put_back(module: nn.Module, *_: object) -> None:
        module._parameters.update(parameters)

    return put_back
