"""Requirements of a transformers model that runs as stages of a pipeline, checked before it is cut.

The cut relies on a decoder that does nothing but run its parts in order. Two short forwards without any layer show it:
they must give back the hidden states that they are given, and hand the layers the same arguments whatever those are.
Where tensor parallelism cuts the words of the head, two more show that the model treats the logits of each word alone.
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
from ds_hetero.frameworks.transformers.stages.meta import fill_buffers, is_on_meta
from ds_hetero.frameworks.transformers.stages.parts import NO_PIPELINES, Absent, DecoderParts, parts_of
from ds_hetero.frameworks.transformers.stages.tensor_checks import check_tensor_model, check_tensor_stages
from ds_hetero.runtime.devices import default_device
from ds_hetero.values.plans import Plan

_HEAD = "ForCausalLM"
_PROBE_TOKENS = 4


def check_cuttable(model: nn.Module) -> None:
    """Refuse a model that cannot be cut into stages, whatever the plan. Raises `ModelError` with the reason."""
    pretrained = pretrained_of(model)
    name = type(pretrained).__name__
    if not name.endswith(_HEAD):
        raise ModelError(
            f"{name} cannot be cut into pipeline stages: only models with a ...{_HEAD} head can. {NO_PIPELINES}"
        )
    if own := own_loss_function(pretrained):
        raise ModelError(
            f"{name} has a loss function of its own, {own}, which takes the logits and labels of the whole batch; "
            "pipelines run micro-batches, and add up the cross entropy of tokens. Leave model.loss_function alone, or "
            'share sequences by a schedule without "parallel": "full", where it is called.'
        )
    parts = parts_of(pretrained)
    if is_on_meta(model):
        fill_buffers(model, default_device())
    _expect_runs_parts_only(pretrained, parts)
    if not is_on_meta(model):
        _expect_token_loss(pretrained, parts)


def impossible_inners(model: nn.Module) -> dict[str, str]:
    """Return why ranks cannot share the work of a stage of this model, by the way in which they cannot."""
    reasons = {"tensor": _refusal(_check_cut_words, model), "sequence": _refusal(_check_sharded, model)}
    return {inner: reason for inner, reason in reasons.items() if reason is not None}


def _check_cut_words(model: nn.Module) -> None:
    """Refuse a model whose stages cannot be cut by tensor parallelism, or that mixes the logits of different words."""
    check_tensor_model(model)
    pretrained, device = pretrained_of(model), default_device()
    parts, head = parts_of(pretrained), pretrained.get_output_embeddings()
    assert isinstance(pretrained, nn.Module) and isinstance(head, nn.Linear)
    name = next(name for name, module in pretrained.named_modules() if module is head)
    dtype, words = pretrained.dtype, head.out_features
    hidden = torch.ones(1, _PROBE_TOKENS, head.in_features, dtype=dtype, device=device)
    logits = torch.linspace(-2, 2, _PROBE_TOKENS * words, dtype=dtype, device=device).view(1, _PROBE_TOKENS, words)
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    half = words // 2

    def of_given(given: Tensor) -> Tensor:
        pretrained.set_submodule(name, _Given(given.clone()))
        made: Tensor = pretrained(inputs_embeds=hidden, position_ids=positions, use_cache=False).logits
        return made

    with _without_layers(pretrained.base_model, parts), torch.no_grad():
        try:
            whole, end = of_given(logits), of_given(logits[..., half:])
        except (AttributeError, TypeError, KeyError, RuntimeError, IndexError) as error:
            raise ModelError(
                f"{type(pretrained).__name__} cannot run in tensor-parallel stages: it does not run without its layers "
                f"on logits of a part of its words ({type(error).__name__}: {error}). Use stages of one rank or "
                "sequence."
            ) from None
        finally:
            pretrained.set_submodule(name, head)
    if whole.shape[-1] != words or not torch.allclose(whole[..., half:], end, rtol=1e-2, atol=1e-2):
        raise ModelError(
            f"{type(pretrained).__name__} cannot run in tensor-parallel stages: what it makes of the logits of a word "
            "depends on those of others, which other ranks have. Use stages of one rank or sequence."
        )


def _check_sharded(model: nn.Module) -> None:
    """Refuse a model whose stages cannot be split over the sequence."""
    check_model(model)
    if any(map(depends_on_length, model.modules())):
        raise ModelError(
            f"{type(pretrained_of(model)).__name__} cannot be split over the sequence inside a pipeline stage: its "
            "rotary embedding depends on the length of the sequence. Use stages of one rank, or no pipelines."
        )


def _refusal(check: Callable[[nn.Module], None], model: nn.Module) -> str | None:
    try:
        check(model)
    except ModelError as error:
        return str(error)
    return None


def check_stages(model: nn.Module, plan: Plan) -> None:
    """Refuse a model that cannot be cut as the plan says, or another one than the plan is for.

    Raises:
        ModelError: the model cannot be cut; with the reason.
        PlanError: the plan is for a model with other numbers of layers or heads.
    """
    check_cuttable(model)
    pretrained = pretrained_of(model)
    _expect_planned_model(pretrained, plan, len(getattr(pretrained.base_model, parts_of(pretrained).layers)))
    inners = {stage.inner for pipeline in plan.pipelines for stage in pipeline.stages}
    if "sequence" in inners:
        _check_sharded(model)
    if "tensor" in inners:
        _check_cut_words(model)
        check_tensor_stages(model, plan)


def _expect_planned_model(pretrained: PretrainedModel, plan: Plan, num_layers: int) -> None:
    assert plan.model is not None
    heads = head_counts(pretrained)
    planned = plan.model.num_layers, plan.model.num_heads, plan.model.num_kv_heads
    if planned != (num_layers, *heads):
        raise PlanError(
            f"the plan is for a model of {planned[0]} layers, {planned[1]} heads and {planned[2]} KV heads; "
            f"{type(pretrained).__name__} has {num_layers}, {heads[0]} and {heads[1]}. Make a plan for "
            "this model: ds-hetero plan --model <its config.json>."
        )


def _expect_runs_parts_only(pretrained: PretrainedModel, parts: DecoderParts) -> None:
    decoder = pretrained.base_model
    weight = next(decoder.parameters())
    device = default_device() if weight.is_meta else weight.device  # nothing that is left of the decoder is on meta
    hidden_size = pretrained.config.get_text_config().to_dict()["hidden_size"]
    given = [torch.full((1, _PROBE_TOKENS, hidden_size), x, dtype=weight.dtype, device=device) for x in (1, 2)]
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    with _without_layers(decoder, parts) as recorded, torch.no_grad():
        try:
            results = [decoder(inputs_embeds=x, position_ids=positions, use_cache=False)[0] for x in given]
        except (AttributeError, TypeError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"{type(pretrained).__name__} cannot be cut into pipeline stages: its decoder does not run without its "
                f"layers ({type(error).__name__}: {error}). {NO_PIPELINES}"
            ) from None
    does_more = any(not torch.equal(result, x) for result, x in zip(results, given, strict=True))
    half = len(recorded) // 2
    depends = any(not _equal(a, b) for a, b in zip(recorded[:half], recorded[half:], strict=True))
    if does_more or depends:
        what = "changes the hidden states outside its layers" if does_more else "hands layers more than hidden states"
        raise ModelError(
            f"{type(pretrained).__name__} cannot be cut into pipeline stages: its decoder {what}, which the stages "
            f"after the first would do again or lack. {NO_PIPELINES}"
        )


def _expect_token_loss(pretrained: PretrainedModel, parts: DecoderParts) -> None:
    """Refuse a model whose forward makes another loss of labels than the cross entropy of its logits, as stages do."""
    assert isinstance(pretrained, nn.Module)
    weight = next(pretrained.base_model.parameters())
    width = pretrained.config.get_text_config().to_dict()["hidden_size"]
    steps = torch.linspace(-1, 1, _PROBE_TOKENS * width, device=weight.device).sin()
    hidden = steps.view(1, _PROBE_TOKENS, width).to(weight.dtype)
    positions = torch.arange(_PROBE_TOKENS, device=weight.device)[None]
    with _without_layers(pretrained.base_model, parts), torch.no_grad():
        try:
            outputs = pretrained(inputs_embeds=hidden, position_ids=positions, labels=positions, use_cache=False)
        except (AttributeError, TypeError, KeyError, RuntimeError, IndexError):
            return  # it does not run without layers; what stages need of it has been looked at
    loss, logits = getattr(outputs, "loss", None), getattr(outputs, "logits", None)
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor) or logits.shape[1] != _PROBE_TOKENS:
        return
    mean = nn.functional.cross_entropy(logits[0, :-1].float(), positions[0, 1:])
    aux = getattr(outputs, "aux_loss", None)  # of routers, which has a rule of its own
    if aux is None and not torch.allclose(loss.float(), mean, rtol=1e-2, atol=1e-3):
        raise ModelError(
            f"{type(pretrained).__name__} makes another loss of its labels than the cross entropy of its logits "
            f"({float(loss):.4g} for {float(mean):.4g} in a short forward without layers), and pipelines compute the "
            f"latter. {NO_PIPELINES}"
        )


class _Recording(Absent):
    """An absent layer that remembers its arguments."""

    def __init__(self, recorded: list[list[object]]) -> None:
        super().__init__()
        self._recorded = recorded

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        self._recorded.append([*args, *kwargs.values()])
        return hidden


class _Given(nn.Module):
    """A head that gives the logits that it was made with."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._logits = logits

    def forward(self, hidden: Tensor) -> Tensor:
        return self._logits


@contextlib.contextmanager
def _without_layers(decoder: nn.Module, parts: DecoderParts) -> Iterator[list[list[object]]]:
    """Let the decoder run none of its parts inside, in training, and record the arguments of its layers."""
    layers = getattr(decoder, parts.layers)
    kept, beside = list(layers), {name: getattr(decoder, name) for name in (*parts.before, *parts.after)}
    recorded: list[list[object]] = []
    modes = {module: module.training for module in decoder.modules()}
    try:
        for i in range(len(layers)):
            layers[i] = _Recording(recorded)
        for name in beside:
            setattr(decoder, name, Absent())
        decoder.train()
        yield recorded
    finally:
        for module, mode in modes.items():
            module.training = mode
        for i, layer in enumerate(kept):
            layers[i] = layer
        for name, module in beside.items():
            setattr(decoder, name, module)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b)
