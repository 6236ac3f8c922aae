"""Requirements of a transformers model that runs as stages of a pipeline, checked before it is cut.

Stages compute the same as the model only if its decoder does nothing but run its parts in order. This is tested by
short forwards whose layers are replaced by placeholders:

    input                              requirement
    hidden states of 1, then of 2      the decoder returns them, and passes its layers the same arguments both times
    labels                             the loss is the cross entropy of the logits
    logits of the vocabulary, then     the logits of a vocabulary entry do not depend on others (tensor-parallel
    of its second half                 stages)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ds_hetero.errors import ModelError, PlanError
from ds_hetero.frameworks.transformers.model.model_checks import check_model, head_counts, pretrained_of
from ds_hetero.frameworks.transformers.model.own_loss import own_loss_function
from ds_hetero.frameworks.transformers.model.rotary_length import depends_on_length
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.frameworks.transformers.stages.adapter_checks import (
    expect_known_adapters,
    expect_weights_of_one_layer,
)
from ds_hetero.frameworks.transformers.stages.meta import fill_buffers, is_on_meta
from ds_hetero.frameworks.transformers.stages.packed_weights import expect_four_bits
from ds_hetero.frameworks.transformers.stages.parts import NO_PIPELINES, Absent, DecoderParts, parts_of
from ds_hetero.frameworks.transformers.stages.tensor_checks import (
    check_tensor_parallel_degrees,
    check_tensor_parallel_model,
)
from ds_hetero.runtime.devices import default_device
from ds_hetero.values.plans import Plan

_HEAD = "ForCausalLM"
_PROBE_TOKENS = 4  # chosen: enough for a causal mask with several rows
# Errors of a forward without layers in a model whose decoder does more than run its parts.
_PROBE_ERRORS = (AttributeError, TypeError, KeyError, RuntimeError)


def check_cuttable(model: nn.Module) -> None:
    """Refuse a model that no plan can cut into stages. Raises `ModelError` with the reason."""
    expect_known_adapters(model)
    pretrained = pretrained_of(model)
    name = type(pretrained).__name__
    expect_four_bits(pretrained)
    if not name.endswith(_HEAD):
        raise ModelError(
            f"{name} cannot be cut into pipeline stages: only models with a ...{_HEAD} head can. {NO_PIPELINES}"
        )
    if loss_function := own_loss_function(pretrained):
        raise ModelError(
            f"{name} has a custom loss function, {loss_function}, which takes the logits and labels of the whole "
            "batch, but pipelines run micro-batches, and add up the cross entropy of tokens. Remove the custom "
            'model.loss_function, or leave out "parallel": "full"; a schedule that shares sequences calls the function.'
        )
    parts = parts_of(pretrained)
    expect_weights_of_one_layer(model, pretrained, parts)
    if is_on_meta(model):
        fill_buffers(model, default_device())
    _expect_runs_parts_only(pretrained, parts)
    if not is_on_meta(model):
        _expect_token_loss(pretrained, parts)


def impossible_stage_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kinds of stages (values of ``"inner"``) that this model cannot have, each with the reason."""
    reasons = {"tensor": _refusal(_check_tensor_parallel, model), "sequence": _refusal(_check_sharded, model)}
    return {stage_kind: reason for stage_kind, reason in reasons.items() if reason is not None}


def _check_tensor_parallel(model: nn.Module) -> None:
    """Refuse a model whose stages tensor parallelism cannot shard. Raises `ModelError`.

    One reason is that the model changes the logit of one vocabulary entry by those of others, as a softmax does. To
    find this out, the head is replaced by one with constant logits. The model must return the same logits for the
    second half of the vocabulary, with and without the first half.
    """
    check_tensor_parallel_model(model)
    pretrained = pretrained_of(model)
    device = default_device()
    parts = parts_of(pretrained)
    head = pretrained.get_output_embeddings()
    assert isinstance(pretrained, nn.Module) and isinstance(head, nn.Linear)
    head_name = next(name for name, module in pretrained.named_modules() if module is head)
    dtype, words = pretrained.dtype, head.out_features
    hidden = torch.ones(1, _PROBE_TOKENS, head.in_features, dtype=dtype, device=device)
    logits = torch.linspace(-2, 2, _PROBE_TOKENS * words, dtype=dtype, device=device).view(1, _PROBE_TOKENS, words)
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    half = words // 2

    def output_logits(head_logits: Tensor) -> Tensor:
        pretrained.set_submodule(head_name, _ConstantHead(head_logits.clone()))
        logits: Tensor = pretrained(inputs_embeds=hidden, position_ids=positions, use_cache=False).logits
        return logits

    with _without_layers(pretrained.base_model, parts), torch.no_grad():
        try:
            logits_of_all = output_logits(logits)
            logits_of_half = output_logits(logits[..., half:])
        except (*_PROBE_ERRORS, IndexError) as error:
            raise ModelError(
                f"{type(pretrained).__name__} cannot run in tensor-parallel stages: ds_hetero could not check that "
                f"its head works on a shard of the vocabulary ({type(error).__name__}: {error}). Use stages of one "
                'rank, or "inner": "sequence".'
            ) from None
        finally:
            pretrained.set_submodule(head_name, head)
    # 1e-2 allows for rounding of bf16 logits between -2 and 2; a softmax over words would change them by far more.
    has_all_words = logits_of_all.shape[-1] == words
    if not has_all_words or not torch.allclose(logits_of_all[..., half:], logits_of_half, rtol=1e-2, atol=1e-2):
        raise ModelError(
            f"{type(pretrained).__name__} cannot run in tensor-parallel stages: the output logit of a vocabulary entry "
            "depends on logits of other entries, which other ranks hold. Use stages of one rank, or "
            '"inner": "sequence".'
        )


def _check_sharded(model: nn.Module) -> None:
    """Refuse a model whose stages cannot be split over the sequence. Raises `ModelError`."""
    check_model(model)
    if any(map(depends_on_length, model.modules())):
        raise ModelError(
            f"{type(pretrained_of(model)).__name__} cannot be split over the sequence inside a pipeline stage: its "
            "rotary embedding depends on the length of the sequence. Use stages of one rank, or no pipelines."
        )


def _refusal(check: Callable[[nn.Module], None], model: nn.Module) -> str | None:
    """Return the text of the `ModelError` that a check raises; None if the model passes."""
    try:
        check(model)
    except ModelError as error:
        return str(error)
    return None


def check_stages(model: nn.Module, plan: Plan) -> None:
    """Refuse a model that cannot be cut as the plan says, or that differs from the model the plan was made for.

    Raises:
        ModelError: the model cannot be cut, with the reason.
        PlanError: the plan is for a model with another number of layers or heads.
    """
    check_cuttable(model)
    pretrained = pretrained_of(model)
    layers = getattr(pretrained.base_model, parts_of(pretrained).layers)
    _expect_planned_model(pretrained, plan, len(layers))
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(stage.inner == "sequence" for stage in stages):
        _check_sharded(model)
    if any(stage.is_tensor_parallel for stage in stages):
        _check_tensor_parallel(model)
        check_tensor_parallel_degrees(model, plan)


def _expect_planned_model(pretrained: PretrainedModel, plan: Plan, num_layers: int) -> None:
    """Refuse a plan for a model with other numbers of layers, heads or KV heads. Raises `PlanError`."""
    planned_model = plan.model
    assert planned_model is not None
    num_heads, num_kv_heads = head_counts(pretrained)
    if (planned_model.num_layers, planned_model.num_heads, planned_model.num_kv_heads) != (
        num_layers,
        num_heads,
        num_kv_heads,
    ):
        raise PlanError(
            f"the plan is for a model of {planned_model.num_layers} layers, {planned_model.num_heads} heads and "
            f"{planned_model.num_kv_heads} KV heads; {type(pretrained).__name__} has {num_layers}, {num_heads} and "
            f"{num_kv_heads}. Make a plan for this model: ds-hetero plan --model <its config.json>."
        )


def _expect_runs_parts_only(pretrained: PretrainedModel, parts: DecoderParts) -> None:
    """Refuse a decoder that changes hidden states outside its parts, or computes more from them for its layers.

    Raises:
        ModelError: with the reason.
    """
    decoder = pretrained.base_model
    weight = next(decoder.parameters())
    # All parts are placeholders, so no tensor on the meta device takes part in the forward.
    device = default_device() if weight.is_meta else weight.device
    hidden_size = pretrained.config.get_text_config().to_dict()["hidden_size"]
    ones = torch.ones(1, _PROBE_TOKENS, hidden_size, dtype=weight.dtype, device=device)
    twos = 2 * ones
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    with _without_layers(decoder, parts) as arguments, torch.no_grad():
        try:
            result_of_ones = decoder(inputs_embeds=ones, position_ids=positions, use_cache=False)[0]
            num_calls = len(arguments)
            result_of_twos = decoder(inputs_embeds=twos, position_ids=positions, use_cache=False)[0]
        except _PROBE_ERRORS as error:
            raise ModelError(
                f"{type(pretrained).__name__} cannot be cut into pipeline stages: its decoder does not run without its "
                f"layers ({type(error).__name__}: {error}). {NO_PIPELINES}"
            ) from None
    changes_hidden = not torch.equal(result_of_ones, ones) or not torch.equal(result_of_twos, twos)
    if changes_hidden:
        raise ModelError(
            f"{type(pretrained).__name__} cannot be cut into pipeline stages: its decoder changes the hidden states "
            f"outside its layers, which later stages would do again, or not at all. {NO_PIPELINES}"
        )
    # Arguments that follow from positions are the same in both forwards; those computed from hidden states differ.
    if not _equal(arguments[:num_calls], arguments[num_calls:]):
        raise ModelError(
            f"{type(pretrained).__name__} cannot be cut into pipeline stages: its decoder computes arguments of its "
            "layers from hidden states. Later stages would compute them from other hidden states, or not have them. "
            f"{NO_PIPELINES}"
        )


def _expect_token_loss(pretrained: PretrainedModel, parts: DecoderParts) -> None:
    """Refuse a model whose loss is not the cross entropy of its logits, as stages compute it. Raises `ModelError`."""
    assert isinstance(pretrained, nn.Module)
    weight = next(pretrained.base_model.parameters())
    hidden_size = pretrained.config.get_text_config().to_dict()["hidden_size"]
    values = torch.linspace(-1, 1, _PROBE_TOKENS * hidden_size, device=weight.device).sin()
    hidden = values.view(1, _PROBE_TOKENS, hidden_size).to(weight.dtype)
    positions = torch.arange(_PROBE_TOKENS, device=weight.device)[None]
    with _without_layers(pretrained.base_model, parts), torch.no_grad():
        try:
            outputs = pretrained(inputs_embeds=hidden, position_ids=positions, labels=positions, use_cache=False)
        except (*_PROBE_ERRORS, IndexError):
            return  # this model needs its layers to compute a loss; its decoder was checked before
    loss = getattr(outputs, "loss", None)
    logits = getattr(outputs, "logits", None)
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor) or logits.shape[1] != _PROBE_TOKENS:
        return
    mean = nn.functional.cross_entropy(logits[0, :-1].float(), positions[0, 1:])
    if getattr(outputs, "aux_loss", None) is not None:
        return  # the loss includes the routers' auxiliary loss, which this comparison cannot separate
    if not torch.allclose(loss.float(), mean, rtol=1e-2, atol=1e-3):
        raise ModelError(
            f"{type(pretrained).__name__} computes a loss that is not the cross entropy of its logits "
            f"({float(loss):.4g} instead of {float(mean):.4g} in a short forward without layers), but pipelines "
            f"compute the cross entropy. {NO_PIPELINES}"
        )


class _RecordingLayer(Absent):
    """A placeholder for a layer. It appends its arguments, without the hidden states, to ``arguments``."""

    def __init__(self, arguments: list[list[object]]) -> None:
        super().__init__()
        self._arguments = arguments

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        self._arguments.append([*args, *kwargs.values()])
        return hidden


class _ConstantHead(nn.Module):
    """A head that always returns the same logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._logits = logits

    def forward(self, hidden: Tensor) -> Tensor:
        return self._logits


@contextlib.contextmanager
def _without_layers(decoder: nn.Module, parts: DecoderParts) -> Iterator[list[list[object]]]:
    """Inside the context, replace all parts of a decoder by placeholders, and set training mode.

    Yields:
        A list to which every call of a layer appends its arguments.
    """
    layers = getattr(decoder, parts.layers)
    real_layers = list(layers)
    real_parts = {name: getattr(decoder, name) for name in (*parts.before, *parts.after)}
    modes = {module: module.training for module in decoder.modules()}
    arguments: list[list[object]] = []
    try:
        for index in range(len(layers)):
            layers[index] = _RecordingLayer(arguments)
        for name in real_parts:
            setattr(decoder, name, Absent())
        decoder.train()  # some decoders, such as those with LayerDrop, do more in training than in evaluation
        yield arguments
    finally:
        for module, mode in modes.items():
            module.training = mode
        for index, layer in enumerate(real_layers):
            layers[index] = layer
        for name, module in real_parts.items():
            setattr(decoder, name, module)


def _equal(a: object, b: object) -> bool:
    """Return True for equal tensors, for lists of equal elements, and for other objects of the same type."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b)
