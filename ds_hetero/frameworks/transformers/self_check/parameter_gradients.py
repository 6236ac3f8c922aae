"""Gradients of parameters in the self-check: a random projection of each is compared.

Outputs of modules, and the gradients at them, show only faults that change a token. A layer that mixes tokens and
starts at zero (the convolution over neighbours of Canon layers, the zero convolution of adapters) changes no token at
first. So all outputs, and the gradients at them, are right, and only the gradient of the layer's parameters is wrong.

During a run, a second leaf tensor with the same storage replaces each parameter in its module. Gradient hooks of ZeRO
and of scripts belong to the parameter, so none of them fires. With ZeRO-3 the leaf replaces the parameter only while
the module runs, between gather and release, and keeps the gathered values alive until the backward ends.
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
MAX_ELEMENTS = 1 << 22  # of all parameters that are compared every time
MAX_TURN_ELEMENTS = 1 << 24  # of all parameters in one turn

NUM_SUMS = 16  # numbers in a projection; their root mean square varies by a sixth between draws of signs

# Attributes that ZeRO-3 reads from the entries of a module's _parameters, so the leaf needs them, too:
# - partitioned_param_coordinator.py, __params_to_release, when a child module is released: it compares ids with the
#   parameters of modules that run next, of which a parent with parameters of its own has leaves at that moment;
# - linear.py, backward of a linear layer: it asks whether the weight is gathered.
_READ_BY_ZERO_3 = ("ds_id", "ds_numel", "ds_status")


def compared_parameters(model: nn.Module, decoder: nn.Module, comparison: int) -> list[str]:
    """Return the names of trained parameters whose gradients this comparison covers; the same on every rank.

    The smallest parameters are compared every time, as many as `MAX_ELEMENTS` allows. Larger ones take turns, of up to
    `MAX_TURN_ELEMENTS` each; a parameter that is larger than that is never compared.

    Example: parameters of 3M, 2M, 9M and 20M elements. 2M is compared every time, since 2M + 3M exceed 4M. 3M and 9M
    together are one turn. 20M is too large.

    In a mixture of experts in half precision, none is compared: rounding moves tokens between experts from run to run,
    and one token more changes a gradient of a piece by a tenth.

    Args:
        model: with the ``requires_grad`` of training, before `traceless` changes it.
        decoder: the part of the model whose parameters are compared; modules outside it run unsharded on every rank.
        comparison: number of the comparison, from 0.
    """
    # Experts that are divided among ranks are no rank's own: a whole run on every rank adds all ranks' gradients up.
    ids_of_decoder = {id(p) for p in decoder.parameters() if p.requires_grad and getattr(p, "allreduce", True)}
    trained = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids_of_decoder}
    is_half = any(parameter.dtype.itemsize < 4 for parameter in trained.values())
    if is_half and containers_of_experts(model):
        return []
    # numel() is 0 for a parameter that ZeRO-3 has not gathered; ds_numel is its real size.
    sizes = {name: int(getattr(parameter, "ds_numel", parameter.numel())) for name, parameter in trained.items()}
    always: list[str] = []
    turns: list[list[str]] = []
    remaining, remaining_in_turn = MAX_ELEMENTS, 0  # elements that may be added
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        size = sizes[name]
        if size <= remaining:
            always.append(name)
            remaining -= size
            continue
        remaining = 0  # from the first parameter that does not fit, all take turns
        if size > MAX_TURN_ELEMENTS:
            break
        if size > remaining_in_turn:
            turns.append([])
            remaining_in_turn = MAX_TURN_ELEMENTS
        turns[-1].append(name)
        remaining_in_turn -= size
    if not turns:
        return always
    return always + turns[comparison % len(turns)]


class SubstituteParameters:
    """Second leaf tensors that replace some of a model's parameters during one run.

    Args:
        names: names of the parameters.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model = model
        parameters = dict(model.named_parameters())
        self._name_by_id = {id(parameters[name]): name for name in names}
        self._leaves: dict[str, nn.Parameter] = {}

    @contextlib.contextmanager
    def substituted(self) -> Iterator[None]:
        """Replace the parameters by their leaves inside the context."""
        hooks: list[RemovableHandle] = []
        replaced: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        try:
            for module in self._model.modules():
                parameters = {
                    key: parameter
                    for key, parameter in module._parameters.items()
                    if parameter is not None and id(parameter) in self._name_by_id
                }
                if not parameters:
                    continue
                replaced.append((module, parameters))
                uses_zero3 = any(hasattr(parameter, "ds_id") for parameter in parameters.values())
                if not uses_zero3:
                    self._replace(module, parameters)
                    continue
                # ZeRO-3 gathers in a pre-hook and releases in a post-hook. This pre-hook runs last, after the gather.
                # This post-hook runs first, so that the release finds the parameters themselves in the module.
                hooks.append(module.register_forward_pre_hook(self._replace_hook(parameters)))
                restore = _restore_hook(parameters)
                hooks.append(module.register_forward_hook(restore, always_call=True, prepend=True))
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

    def _replace_hook(self, parameters: Mapping[str, nn.Parameter]) -> Callable[..., None]:
        """Return a pre-hook that replaces these parameters of a module."""
        return lambda module, *_: self._replace(module, parameters)

    def _replace(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace these parameters of a module by their leaves; a tied parameter has one leaf."""
        for key, parameter in parameters.items():
            if parameter.numel() == 0:  # ZeRO-3 has not gathered it
                continue
            name = self._name_by_id[id(parameter)]
            if name not in self._leaves:
                self._leaves[name] = _make_leaf(parameter)
            module._parameters[key] = self._leaves[name]


def _make_leaf(parameter: nn.Parameter) -> nn.Parameter:
    """Return a leaf tensor with the parameter's storage, and the attributes that ZeRO-3 reads."""
    leaf = nn.Parameter(parameter.detach())
    for name in _READ_BY_ZERO_3:
        if hasattr(parameter, name):
            setattr(leaf, name, getattr(parameter, name))
    return leaf


def project(name: str, gradient: Tensor) -> Tensor:
    """Return NUM_SUMS sums over a gradient's elements with random signs; element i is in sum i modulo NUM_SUMS.

    The signs depend only on ``name``, the parameter's, so they are the same on every rank.
    """
    flat = gradient.detach().flatten()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, (flat.numel(),), generator=generator, dtype=torch.int8) * 2 - 1
    signed = flat.float() * signs.to(flat.device)
    padding = -flat.numel() % NUM_SUMS
    return nn.functional.pad(signed, (0, padding)).view(-1, NUM_SUMS).double().sum(0).cpu()


def _restore_hook(parameters: Mapping[str, nn.Parameter]) -> Callable[..., None]:
    """Return a forward hook that puts these parameters back into their module."""

    def restore(module: nn.Module, *_: object) -> None:
        module._parameters.update(parameters)

    return restore
