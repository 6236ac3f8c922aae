"""Tensor-parallel stages: transformers' own plan of a model, applied to the layers of one stage.

Parameters are torch's DTensors, which say how they are sharded; layers compute with the local parts, since a layer of
DTensors takes the host several times as long and adds up the gradient of one input once for every layer that takes it.
Embedding and head are sharded by words, which transformers' plans do not do: their head gathers all logits on every
rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ds_hetero.frameworks.transformers.model.model_checks import head_counts
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.frameworks.transformers.stages.parts import Absent, parts_of
from ds_hetero.frameworks.transformers.stages.random_draws import draws_randomly
from ds_hetero.runtime.cut_dropout import CutHeads, drop_part
from ds_hetero.runtime.cut_linear import CutLinears
from ds_hetero.runtime.vocabulary import VocabularyPart, embed_part, project_to_part

COLUMN_STYLE, ROW_STYLE = "colwise", "rowwise"
PARTIAL_STYLE = "replicated_with_grad_allreduce"  # weights per head: whole on every rank, whose gradient is a summand


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
        self._plan, self._mesh, self._linears = tensor_plan_of(pretrained), mesh, CutLinears(self.group)
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
            if isinstance(module, nn.Linear) and style in (COLUMN_STYLE, ROW_STYLE):
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
        start = -(-size // self._mesh.size()) * self._mesh.get_local_rank() if style == ROW_STYLE else 0

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
        cut = Shard(0) if style == COLUMN_STYLE else Shard(1) if name == "weight" else Replicate()
        shard = distribute_tensor(whole.detach(), mesh, [cut])
        module.register_parameter(name, nn.Parameter(shard, requires_grad=whole.requires_grad))

    def columns(x: Tensor) -> Tensor:
        return linears.columns(lambda taken: _with_local_parameters(module, taken), x)

    def rows(x: Tensor) -> Tensor:
        return linears.rows(lambda own: _with_local_parameters(module, own, bias=None), x, _local(module.bias))

    module.forward = columns if style == COLUMN_STYLE else rows  # type: ignore[assignment,method-assign]


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
    plan = tensor_plan_of(pretrained)
    names = [name for name, _ in pretrained.base_model.named_parameters()]
    return frozenset(name for name in names if _style_of(name.rpartition(".")[0], plan) == PARTIAL_STYLE)


def tensor_plan_of(pretrained: PretrainedModel) -> Mapping[str, str]:
    """Styles of modules by name, as the configuration plans them; empty if it does not."""
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
