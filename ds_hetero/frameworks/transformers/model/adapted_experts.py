"""LoRA adapters of PEFT on a layer's experts: which of them can be divided with the experts, and how they are.

PEFT wraps the module of experts once for each weight that ``target_parameters`` names. A wrapper adds the product of
two low-rank factors to its weight while the module runs. Both factors are weights of linear layers, and have values for
every expert:

    lora_A    [E * r, in]     rows of expert e: e * r to (e + 1) * r
    lora_B    [out, r * E]    columns of expert e: e, E + e, 2 * E + e, ...

So a rank keeps the values of its experts, and the wrapper computes with as many experts as the rank has.

Dimension key: E experts of a layer, n those of this rank, r rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_hetero.runtime.experts.parts import Holder

_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")  # module and name of the class that adapts a parameter
# A factor's linear layers in the wrapper, by name of the adapter; and whether values of an expert are in columns.
_FACTORS = {"lora_A": False, "lora_B": True}


def wrappers_of(model: nn.Module) -> Mapping[int, nn.Module]:
    """Return the module around each module that adapters wrap, by id of the inner module."""
    wrappers = {}
    for module in model.modules():
        base_layer = vars(module).get("_modules", {}).get("base_layer")
        if isinstance(base_layer, nn.Module):
            wrappers[id(base_layer)] = module
    return wrappers


def chain_around(module: nn.Module, wrappers: Mapping[int, nn.Module]) -> list[nn.Module]:
    """Return all wrappers around a module, the innermost first."""
    chain = []
    outer = wrappers.get(id(module))
    while outer is not None:
        chain.append(outer)
        outer = wrappers.get(id(outer))
    return chain


def adapter_problem(module: Any, chain: Sequence[nn.Module]) -> str:
    """Return why adapters on a layer's experts cannot be divided with them; empty if they can, or if there are none.

    Args:
        module: the experts, whole.
        chain: the wrappers around it.
    """
    for wrapper in chain:
        kind = type(wrapper)
        if (kind.__module__, kind.__name__) != _WRAPPER:
            return f"has adapters of the class {kind.__name__}, and only LoRA's on its weights can be divided"
        name = str(wrapper.parameter_name)
        if name not in module._parameters:
            return f"has an adapter on {name}, which is quantized"
        if module._parameters[name].dim() != 3:
            return f"has an adapter on {name}, which has {module._parameters[name].dim()} dimensions and not 3"
        for factor, in_columns in _FACTORS.items():
            for layer in getattr(wrapper, factor).values():
                shape = tuple(layer.weight.shape)
                if layer.bias is not None or shape[in_columns] % module.num_experts:
                    return f"has an adapter on {name} whose {factor} {shape} has no part for each expert"
    return ""


def holders_of(chain: Sequence[nn.Module], name_by_id: Mapping[int, str]) -> Iterator[Holder]:
    """Yield the linear layers of the factors of all adapters around a layer's experts.

    Args:
        name_by_id: names of the model's modules.
    """
    for wrapper in chain:
        for factor, in_columns in _FACTORS.items():
            for layer in getattr(wrapper, factor).values():
                yield Holder(layer, name_by_id[id(layer)], in_columns)


def use_fewer_experts(chain: Sequence[Any], num_local: int) -> None:
    """Let adapters compute with this rank's experts, after their factors were cut.

    Args:
        num_local: experts of this rank.
    """
    for wrapper in chain:
        vars(wrapper)["num_experts"] = num_local
        if num_local < 2:
            # PEFT takes a parameter of one expert for a plain matrix, and cannot reshape factors without values.
            vars(wrapper)["get_delta_weight"] = _DeltaOfFew(wrapper)


class _DeltaOfFew:
    """Replaces ``get_delta_weight`` of a wrapper that has one expert or none on this rank."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __call__(self, adapter: str, *_: object, **__: object) -> Tensor:
        """Return what an adapter adds to the weight, of its shape: [n, ...], n 0 or 1."""
        wrapper = self._wrapper
        weight: Tensor = wrapper.get_param()
        if not wrapper.num_experts:
            return weight.new_zeros(weight.shape)
        # One expert: [r, in] and [out, r] are its factors as they are.
        delta: Tensor = wrapper.lora_B[adapter].weight @ wrapper.lora_A[adapter].weight
        # Weights are [n, out, in], or [n, in, out] in modules that transformers calls transposed.
        delta = delta.t() if wrapper.get_base_layer().is_transposed else delta
        scaling: float = wrapper.scaling[adapter]
        return (delta * scaling).unsqueeze(0).to(weight.dtype)


def trains(holders: Sequence[Holder]) -> bool:
    """Return True if any parameter of these modules needs gradients; the same on every rank."""
    return any(parameter.requires_grad for holder in holders for parameter in holder.module.parameters())
