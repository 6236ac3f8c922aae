"""The parts of a decoder by transformers' own pipeline plan: embedding, layers, last norm; and a part that is absent.

A model that is to be cut says in ``base_model_pp_plan`` of its configuration which modules its decoder runs in order.

Tensor-parallel stages: transformers' own plan of a model, applied to the layers of one stage. Parameters are torch's
DTensors, which say how they are cut; layers compute with the local parts, since a layer of DTensors takes the host
several times as long and adds up the gradient of one input once for every layer that takes it.
Embedding and head are cut by words, which transformers' plans do not do: their head gathers all logits on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import DROPOUTS, head_counts, pretrained_of
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.cut_dropout import CutHeads, drop_part
from ds_hetero.runtime.cut_linear import CutLinears
from ds_hetero.runtime.vocabulary import VocabularyPart, embed_part, project_to_part
from ds_hetero.values.plans import Plan


class Absent(nn.Module):
    """A module of another stage: it gives back what it is given."""

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return ``hidden``."""
        return hidden


NO_PIPELINES = 'Share its sequences by a schedule: leave "parallel": "full" and pipelines out.'


class DecoderParts(NamedTuple):
    """Names of a decoder's modules."""

    before: tuple[str, ...]  # of those before the layers, which the first stage holds
    layers: str  # of the list of layers
    after: tuple[str, ...]  # of those after the layers, which the last stage holds


def parts_of(pretrained: PretrainedModel) -> DecoderParts:
    """Return the parts of a model's decoder. Raises `ModelError`: it has no pipeline plan, or another one."""
    plan = list(getattr(pretrained.config.get_text_config(), "base_model_pp_plan", None) or ())
    decoder = pretrained.base_model
    lists = [name for name in plan if isinstance(getattr(decoder, name, None), nn.ModuleList)]
    if len(lists) != 1 or any(not hasattr(decoder, name) for name in plan):
        raise ModelError(
            f"{type(pretrained).__name__} cannot be cut into pipeline stages: its configuration does not say in "
            f"base_model_pp_plan which modules come before and after one list of layers (it says {plan}). "
            f"{NO_PIPELINES}"
        )
    at = plan.index(lists[0])
    return DecoderParts(tuple(plan[:at]), lists[0], tuple(plan[at + 1 :]))


def without_memory(layer: nn.Module) -> nn.Module:
    """Put the parameters of a layer on the meta device, so that it can come back."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")  # whole, where it was a shard
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return layer


def with_memory(layer: nn.Module, device: torch.device) -> nn.Module:
    """Give the parameters of a layer memory on a device, filled with zeros."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.zeros_like(parameter, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return layer


_COLUMNS, _ROWS = "colwise", "rowwise"
_PARTIAL = "replicated_with_grad_allreduce"  # weights per head: whole on every rank, whose gradient is a summand


def check_tensor_model(model: nn.Module) -> None:
    """Refuse a model that cannot be cut by tensor parallelism.

    Raises:
        ModelError: it has no tensor-parallel plan, one with a style that is not known here, an embedding or a head of
            an unknown kind, adapters other than LoRA, or dropout inside a kernel of attention.
    """
    pretrained = pretrained_of(model)
    name = type(pretrained).__name__
    styles = set(_plan_of(pretrained).values())
    if unknown := styles - {_COLUMNS, _ROWS, _PARTIAL}:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages: its base_model_tp_plan has {sorted(unknown)}. Use stages of "
            "one rank or sequence."
        )
    if not styles:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages: its configuration has no base_model_tp_plan. Use stages of "
            "one rank or sequence."
        )
    table, head = pretrained.get_input_embeddings(), pretrained.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or table.max_norm is not None or table.sparse or type(head) is not nn.Linear:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages, which cut an nn.Embedding (without max_norm and sparse "
            f"gradients) and an nn.Linear by words: it has {table} and {head}. Use stages of one rank or sequence."
        )
    for adapter in getattr(model, "peft_config", {}).values():
        if what := _beyond_lora(adapter):
            raise ModelError(
                f"{name} cannot run in tensor-parallel stages with adapters that are not plain LoRA ({what}). Use "
                "stages of one rank or sequence."
            )
    config = pretrained.config.get_text_config()
    if any(getattr(config, each, 0) for each in DROPOUTS) and config._attn_implementation != "eager":
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages with dropout inside attention that is "
            f"{config._attn_implementation!r}, of whose mask a rank cannot draw its own heads. Build it with "
            'attn_implementation="eager", or set the dropout to 0.'
        )


def draws_randomly(pretrained: PretrainedModel) -> bool:
    """Whether a forward in training draws random numbers: dropout, of modules or by the configuration."""
    options = pretrained.config.get_text_config().to_dict()
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in pretrained.modules()) or any(
        "drop" in key and isinstance(share, float) and share > 0 for key, share in options.items()
    )


_BESIDE_LORA = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters")


def _beyond_lora(adapter: object) -> str:
    """Why an adapter is more than two matrices beside a linear layer: its kind, or options; empty if it is not."""
    kind = str(getattr(adapter, "peft_type", None)).rpartition(".")[2]
    return kind if kind != "LORA" else ", ".join(key for key in _BESIDE_LORA if getattr(adapter, key, None))


def check_tensor_stages(model: nn.Module, plan: Plan) -> None:
    """Refuse a model that tensor stages cannot hold. Raises `ModelError`: KV heads or words do not divide."""
    name = type(pretrained_of(model)).__name__
    head = pretrained_of(model).get_output_embeddings()
    assert isinstance(head, nn.Linear)
    words = head.out_features
    kv_heads = plan.model.num_kv_heads if plan.model is not None else 1
    degrees = {len(s.ranks) for pipeline in plan.pipelines for s in pipeline.stages if s.inner == "tensor"}
    if wrong := sorted(degree for degree in degrees if kv_heads % degree):
        raise ModelError(
            f"{name} has {kv_heads} KV heads, which tensor parallelism over {wrong[0]} ranks cannot share. Use a "
            'degree that divides them, or "inner": "sequence".'
        )
    if wrong := sorted(degree for degree in degrees if -(-words // degree) * (degree - 1) >= words):
        raise ModelError(
            f"{name} has {words} words, of which tensor parallelism over {wrong[0]} ranks leaves the last rank none. "
            'Use a smaller degree, or "inner": "sequence".'
        )


class TensorCut:
    """Shards of a model on the ranks of a tensor stage.

    Args:
        mesh: of the ranks.

    Attributes:
        words: of the head on this rank; None if another stage has it.
        draws: whether forwards in training draw random numbers, which all ranks then draw alike.
    """

    def __init__(self, pretrained: PretrainedModel, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.draws = draws_randomly(pretrained)
        self._plan, self._mesh, self._linears = _plan_of(pretrained), mesh, CutLinears(self.group)
        self._seen = WeakSet[nn.Module]()  # layers that have been here
        self._heads = head_counts(pretrained)[0]
        decoder, layers = pretrained.base_model, parts_of(pretrained).layers
        for i, layer in enumerate(getattr(decoder, layers)):
            self.cut_layer(layer, f"{layers}.{i}")
        shards: dict[int, nn.Parameter] = {}
        _cut_by_words(pretrained.get_input_embeddings(), mesh, embed_part, shards)
        self.words = _cut_by_words(pretrained.get_output_embeddings(), mesh, project_to_part, shards)

    def cut_layer(self, layer: nn.Module, name: str) -> None:
        """Keep this rank's shards of a layer. ``name``: of the layer in the decoder."""
        for inner, module in layer.named_modules(prefix=name):
            style = _style_of_linear(inner, self._plan)
            if isinstance(module, nn.Linear) and style in (_COLUMNS, _ROWS):
                _cut_linear(module, style, self._mesh, self._linears)
            if self.draws and isinstance(module, nn.Linear) and ".lora_A." in inner:
                dropout = inner.removeprefix(f"{name}.").replace(".lora_A.", ".lora_dropout.")
                self._cut_adapter_dropout(module, layer.get_submodule(dropout), style)
        if self.draws and layer not in self._seen:
            for part in layer.children():  # inside of what recomputation runs again
                self._cut_heads(part)
        self._seen.add(layer)

    def _cut_adapter_dropout(self, matrix: nn.Linear, dropout: nn.Module, style: str) -> None:
        """Let a dropout before LoRA's first matrix drop what one process drops of the whole input."""
        if not isinstance(dropout, nn.Dropout):  # none is asked for
            return
        share, size = dropout.p, matrix.in_features
        start = -(-size // self._mesh.size()) * self._mesh.get_local_rank() if style == _ROWS else 0

        def drop(input: Tensor) -> Tensor:
            return drop_part(input, share, -1, start, size) if dropout.training else input

        dropout.forward = drop  # type: ignore[method-assign]

    def _cut_heads(self, part: nn.Module) -> None:
        """Let attention in a part of a layer drop what one process drops of the probabilities of all heads."""
        own = self._heads // self._mesh.size()
        heads = CutHeads(own * self._mesh.get_local_rank(), own, self._heads, lambda: self._linears.is_inside)
        run = part.forward

        def with_cut_heads(*args: object, **kwargs: object) -> object:
            self._linears.leave()
            with heads:
                return run(*args, **kwargs)

        part.forward = with_cut_heads


def _cut_linear(module: nn.Linear, style: str, mesh: DeviceMesh, linears: CutLinears) -> None:
    """Cut a linear layer by columns or rows, and let its class's own forward run on this rank's part."""
    for name, whole in list(module.named_parameters(recurse=False)):
        cut = Shard(0) if style == _COLUMNS else Shard(1) if name == "weight" else Replicate()
        shard = distribute_tensor(whole.detach(), mesh, [cut])
        module.register_parameter(name, nn.Parameter(shard, requires_grad=whole.requires_grad))

    def columns(x: Tensor) -> Tensor:
        return linears.columns(lambda taken: _with_local_parameters(module, taken), x)

    def rows(x: Tensor) -> Tensor:
        return linears.rows(lambda own: _with_local_parameters(module, own, bias=None), x, _local(module.bias))

    module.forward = columns if style == _COLUMNS else rows  # type: ignore[assignment,method-assign]


def _with_local_parameters(module: nn.Module, x: Tensor, **others: None) -> Tensor:
    """The forward of a module's class with the local parts of its parameters, or ``others`` in their place."""
    held = dict(module._parameters)
    vars(module)["_parameters"].update({name: _local(whole) for name, whole in held.items()} | others)
    try:
        result: Tensor = type(module).forward(module, x)
    finally:
        module._parameters.update(held)
    return result


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _cut_by_words(
    module: nn.Module | None, mesh: DeviceMesh, run: Callable[..., Tensor], shards: dict[int, nn.Parameter]
) -> VocabularyPart | None:
    """Cut an embedding or a head, and let its class's own forward run on the rows of this rank's words.

    Args:
        run: `embed_part` or `project_to_part`.
        shards: made so far, by identity of the whole parameter; one that both modules have is cut once.
    """
    if module is None or isinstance(module, Absent):
        return None
    part = VocabularyPart.of(mesh.get_group(), module.get_parameter("weight").shape[0])
    for name, whole in list(module.named_parameters(recurse=False)):
        if id(whole) not in shards:
            shard = distribute_tensor(whole.detach(), mesh, [Shard(0)])
            shards[id(whole)] = nn.Parameter(shard, requires_grad=whole.requires_grad)
        setattr(module, name, shards[id(whole)])

    def of_class(x: Tensor) -> Tensor:
        padding = getattr(module, "padding_idx", None)
        if padding is not None:  # its row gets no gradient
            vars(module)["padding_idx"] = padding - part.start if part.start <= padding < part.stop else None
        try:
            return _with_local_parameters(module, x)
        finally:
            if padding is not None:
                vars(module)["padding_idx"] = padding

    module.forward = lambda x: run(of_class, x, part)
    return part


def partial_parameters(pretrained: PretrainedModel) -> frozenset[str]:
    """Names inside the decoder of parameters whose copies have parts of a gradient's sum."""
    plan = _plan_of(pretrained)
    names = [name for name, _ in pretrained.base_model.named_parameters()]
    return frozenset(name for name in names if _style_of(name.rpartition(".")[0], plan) == _PARTIAL)


def _plan_of(pretrained: PretrainedModel) -> Mapping[str, str]:
    return dict(getattr(pretrained.config.get_text_config(), "base_model_tp_plan", None) or {})


def _style_of_linear(name: str, plan: Mapping[str, str]) -> str:
    """The style of a linear layer, which may be in one of PEFT's.

    Of LoRA's matrices the one on the side that is cut is cut with it, so that what is between the two is whole on every
    rank: of ``colwise`` layers the second by its rows, of ``rowwise`` ones the first by its columns.
    """
    matrix = re.fullmatch(r"(.*)\.lora_([AB])\.[^.]+", name)
    if matrix is None:
        return _style_of(name.removesuffix(".base_layer"), plan)
    style = _style_of(matrix[1], plan)
    return style if (style, matrix[2]) in (("colwise", "B"), ("rowwise", "A")) else ""


def _style_of(name: str, plan: Mapping[str, str]) -> str:
    """The style of a module: ``layers.3.mlp`` is under ``layers.*.mlp``; empty if none."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
