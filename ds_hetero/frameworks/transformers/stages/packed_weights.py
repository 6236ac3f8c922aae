"""Quantize the weights of a stage in 4 bits by bitsandbytes, or read them as they were stored.

Before a stage has its values, a weight is a placeholder: a ``Params4bit`` of the full shape on the meta device, with
the settings of the quantization. See also `ds_hetero.runtime.packed_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.packed_weights import is_packed

_FOUR_BIT_TYPES = ("nf4", "fp4")  # values of ``bnb_4bit_quant_type``


def expect_four_bits(pretrained: PretrainedModel) -> None:
    """Refuse a quantized model unless bitsandbytes holds its weights in 4 bits. Raises `ModelError`."""
    settings: Any = getattr(pretrained.config, "quantization_config", None)
    if settings is not None:
        _expect_four_bits(settings if isinstance(settings, Mapping) else settings.to_dict())


def quantize_layers(pretrained: Any, settings: Any, *, is_stored_packed: bool) -> None:
    """Replace linear layers of a model on the meta device by those that hold weights in 4 bits, as transformers does.

    Args:
        settings: a ``BitsAndBytesConfig``, or the entry ``quantization_config`` of a config.json.
        is_stored_packed: whether the folder of the model has the weights in 4 bits already.

    Raises:
        ModelError: the settings are not those of 4-bit weights of bitsandbytes.
    """
    from transformers.quantizers import AutoHfQuantizer

    _expect_four_bits(settings if isinstance(settings, Mapping) else settings.to_dict())
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=is_stored_packed)
    quantizer.validate_environment(device_map=None)
    dtype = pretrained.dtype
    quantizer.preprocess_model(model=pretrained, device_map=None)
    for parameter in pretrained.parameters():
        if is_packed(parameter) and not is_stored_packed:  # weights have this dtype before they are quantized
            parameter.data = parameter.data.to(dtype)
    # What ``from_pretrained`` sets: PEFT and the Trainer recognize a model of 4 bits by it.
    pretrained.hf_quantizer = quantizer
    quantizer.postprocess_model(pretrained)


def _expect_four_bits(settings: Mapping[str, Any]) -> None:
    """Refuse settings other than 4 bits of bitsandbytes. Raises `ModelError`."""
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    kind = settings.get("bnb_4bit_quant_type")
    if method == "bitsandbytes" and settings.get("load_in_4bit") and kind in _FOUR_BIT_TYPES:
        return
    bits = ", load_in_8bit" if settings.get("load_in_8bit") else ""
    raise ModelError(
        f"a model quantized by {method}{bits} cannot be cut into pipeline stages: only 4-bit weights of bitsandbytes "
        "are known to train there as in one process. Use BitsAndBytesConfig(load_in_4bit=True, "
        "bnb_4bit_quant_type='nf4')."
    )


def quantize(placeholder: nn.Parameter, values: Tensor, device: torch.device) -> nn.Parameter:
    """Return a weight with these values in 4 bits on a device, with the settings of its placeholder."""
    import bitsandbytes

    packed_class: Any = bitsandbytes.nn.Params4bit  # type: ignore[attr-defined]
    packed: nn.Parameter = packed_class(values, requires_grad=False, **vars(placeholder)).to(device)
    return packed


def restore(
    placeholder: Any, packed: Tensor, constants: Mapping[str, Tensor], name: str, device: torch.device
) -> nn.Parameter:
    """Return a weight that was stored in 4 bits, on a device.

    Args:
        packed: the weight's stored bytes.
        constants: the stored constants, by the names under which bitsandbytes stores them.
        name: of the weight, for the error.

    Raises:
        ModelError: the stored weight has another shape than the placeholder, or its constants are missing.
    """
    import bitsandbytes

    packed_class: Any = bitsandbytes.nn.Params4bit  # type: ignore[attr-defined]
    try:
        parameter: nn.Parameter = packed_class.from_prequantized(
            data=packed,
            quantized_stats=dict(constants),
            requires_grad=False,
            device=device,
            module=placeholder.module,
        )
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"the folder of the model has {name} in 4 bits without all of its constants ({error}). Download or save "
            "the model again."
        ) from error
    stored_shape = tuple(parameter.quant_state.shape)  # type: ignore[attr-defined]
    if stored_shape != tuple(placeholder.shape):
        raise ModelError(
            f"{name} has shape {list(stored_shape)} in the folder and {list(placeholder.shape)} in the model. Give "
            "empty_model the folder of this model."
        )
    return parameter


def free_constants(module: nn.Module) -> None:
    """Free the constants of a layer whose packed weight has been freed."""
    if hasattr(module, "quant_state"):
        module.quant_state = None  # type: ignore[assignment]
