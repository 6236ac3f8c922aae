"""Gradients of parameters in the self-check, compared by a random projection of each.

Outputs of modules, and the gradients at them, show a fault only if it changes a token. A layer that mixes tokens
and starts at zero (Canon layers' convolution over neighbours, the zero convolution of adapters) changes no token at
first: all outputs and their gradients are right, and only its own gradient is wrong.

In each module, a second leaf with the storage of the parameter takes the parameter's place during a run. Gradient
hooks of ZeRO and of scripts belong to the parameter, so none of them fires. With ZeRO-3 the leaf stands there only
while the module runs, between gather and release, and it keeps the gathered values alive until the backward ends.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hetero.frameworks.transformers.model.model_checks import containers_of_experts

# Limits on memory, chosen: 16 MiB of fp32 gradients at every comparison, and 64 MiB more for those that take turns.
MOST_ELEMENTS = 1 << 22  # of parameters that are compared every time, smallest first
MOST_ELEMENTS_IN_TURN = 1 << 24  # of parameters that take turns

NUM_SUMS = 16  # numbers in a projection; their root mean square varies by a sixth between draws of signs

# Attributes that ZeRO-3 reads from whatever stands in a module's _parameters, so the leaf needs them, too:
# - partitioned_param_coordinator.py, __params_to_release, when a child module is released: it compares ids with the
#   parameters of modules that run next, of which a parent with parameters of its own has leaves at that moment;
# - linear.py, backward of a linear layer: it asks whether the weight is gathered.
_READ_BY_ZERO_3 = ("ds_id", "ds_numel", "ds_status")


def compared_parameters(model: nn.Module, decoder: nn.Module, comparison: int) -> list[str]:
    """Return the names of trained parameters whose gradients this comparison covers; the same on every rank.

    The smallest parameters are compared every time, larger ones take turns, those above `MOST_ELEMENTS_IN_TURN` never
    are. A mixture of experts in half precision compares none: rounding moves tokens between experts from run to run,
    and one token more is a tenth of a gradient of a piece.

    Example: parameters of 3M, 2M, 9M and 20M elements. 2M is compared every time, since 2M + 3M exceed 4M. 3M and 9M
    together are one turn. 20M is too large.

    Args:
        model: before a check has changed ``requires_grad``.
        decoder: the part of the model whose parameters are compared; modules outside it run unsharded on every rank.
        comparison: number of the comparison, from 0.
    """
    ids_of_decoder = {id(parameter) for parameter in decoder.parameters() if parameter.requires_grad}
    trained = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids_of_decoder}
    is_half = any(parameter.dtype.itemsize < 4 for parameter in trained.values())
    if is_half and containers_of_experts(model):
        return []
    # With ZeRO-3, numel() of a parameter that is not gathered is 0.
    sizes = {name: int(getattr(parameter, "ds_numel", parameter.numel())) for name, parameter in trained.items()}
    always: list[str] = []
    turns: list[list[str]] = []
    room, room_in_turn = MOST_ELEMENTS, 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        size = sizes[name]
        if size <= room:
            always.append(name)
            room -= size
            continue
        room = 0  # from the first parameter that does not fit, all take turns
        if size > MOST_ELEMENTS_IN_TURN:
            break
        if size > room_in_turn:
            turns.append([])
            room_in_turn = MOST_ELEMENTS_IN_TURN
        turns[-1].append(name)
        room_in_turn -= size
    if not turns:
        return always
    return always + turns[comparison % len(turns)]


class Leaves:
    """Second leaves that stand for some of a model's parameters during one run."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model = model
        by_name = dict(model.named_parameters())
        self._name_of = {id(by_name[name]): name for name in names}
        self._leaves: dict[str, nn.Parameter] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Replace the parameters by their leaves inside."""
        hooks: list[RemovableHandle] = []
        replaced: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        try:
            for module in self._model.modules():
                parameters = {
                    key: parameter
                    for key, parameter in module._parameters.items()
                    if parameter is not None and id(parameter) in self._name_of
                }
                if not parameters:
                    continue
                replaced.append((module, parameters))
                uses_zero3 = any(hasattr(parameter, "ds_id") for parameter in parameters.values())
                if not uses_zero3:
                    self._replace(module, parameters)
                    continue
                # ZeRO-3 gathers in a pre-hook and releases in a post-hook. This pre-hook comes last, after the gather;
                # this post-hook comes first, so that the release finds the parameters themselves in the module.
                hooks.append(module.register_forward_pre_hook(self._replacing(parameters)))
                put_back = _putting_back(parameters)
                hooks.append(module.register_forward_hook(put_back, always_call=True, prepend=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, parameters in replaced:
                module._parameters.update(parameters)

    @property
    def leaves(self) -> Mapping[str, nn.Parameter]:
        """The leaf of each replaced parameter, by the parameter's name."""
        return self._leaves

    def _replacing(self, parameters: Mapping[str, nn.Parameter]) -> Callable[..., None]:
        return lambda module, *_: self._replace(module, parameters)

    def _replace(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        for key, parameter in parameters.items():
            if parameter.numel() == 0:  # ZeRO-3 has not gathered it
                continue
            name = self._name_of[id(parameter)]
            if name not in self._leaves:
                self._leaves[name] = _leaf_of(parameter)
            module._parameters[key] = self._leaves[name]


def _leaf_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return another leaf with the parameter's storage and the attributes that ZeRO-3 reads."""
    leaf = nn.Parameter(parameter.detach())
    for name in _READ_BY_ZERO_3:
        if hasattr(parameter, name):
            setattr(leaf, name, getattr(parameter, name))
    return leaf


def project(name: str, gradient: Tensor) -> Tensor:
    """Return NUM_SUMS sums of a gradient's elements with random signs, each element in one sum.

    The signs depend on the name only, so they are the same on every rank.
    """
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
