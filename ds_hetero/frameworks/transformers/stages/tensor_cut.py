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
        mesh: of the stage's ranks, one dimension.

    Attributes:
        words: this rank's rows of the head; None if another stage has the head.
        draws: whether forwards in training draw random numbers. Then every rank draws those of the whole layer, and
            keeps its part, so that the ranks together drop what one process drops.
    """

    def __init__(self, pretrained: PretrainedModel, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.draws = draws_randomly(pretrained)
        self._plan, self._mesh, self._linears = tensor_plan_of(pretrained), mesh, CutLinears(self.group)
        self._seen = WeakSet[nn.Module]()  # layers whose heads were cut; a layer may leave and come back on a re-plan
        self._heads = head_counts(pretrained)[0]
        decoder, layers = pretrained.base_model, parts_of(pretrained).layers
        for i, layer in enumerate(getattr(decoder, layers)):
            self.cut_layer(layer, f"{layers}.{i}")
        shards: dict[int, nn.Parameter] = {}
        _cut_by_words(pretrained.get_input_embeddings(), mesh, embed_part, shards)
        self.words = _cut_by_words(pretrained.get_output_embeddings(), mesh, project_to_part, shards)

    def cut_layer(self, layer: nn.Module, name: str) -> None:
        """Keep this rank's shards of a layer.

        Args:
            name: of the layer in the decoder, such as ``layers.3``.
        """
        for inner, module in layer.named_modules(prefix=name):
            if not isinstance(module, nn.Linear):
                continue
            style = _style_of_linear(inner, self._plan)
            if style in (COLUMN_STYLE, ROW_STYLE):
                _cut_linear(module, style, self._mesh, self._linears)
            if self.draws and ".lora_A." in inner:
                dropout = inner.removeprefix(f"{name}.").replace(".lora_A.", ".lora_dropout.")
                self._cut_adapter_dropout(module, layer.get_submodule(dropout), style)
        if self.draws and layer not in self._seen:
            # Each part, not the layer: recomputation runs the layer's forward again, and must go through this, too.
            for part in layer.children():
                self._cut_heads(part)
        self._seen.add(layer)

    def _cut_adapter_dropout(self, matrix: nn.Linear, dropout: nn.Module, style: str) -> None:
        """Let the dropout before LoRA's first matrix drop what one process drops of the whole input.

        Example: the input of a ``rowwise`` layer has 10 columns, of which 4 ranks hold 3, 3, 3 and 1. Rank 2 draws for
        all 10 columns, and keeps what was drawn for columns 6, 7 and 8.
        """
        if not isinstance(dropout, nn.Dropout):  # PEFT puts an nn.Identity here where no dropout is requested
            return
        probability, num_columns = dropout.p, matrix.in_features
        columns_each = -(-num_columns // self._mesh.size())
        first_column = columns_each * self._mesh.get_local_rank() if style == ROW_STYLE else 0

        def drop(input: Tensor) -> Tensor:
            if not dropout.training:
                return input
            return drop_part(input, probability, -1, first_column, num_columns)

        dropout.forward = drop  # type: ignore[method-assign]

    def _cut_heads(self, part: nn.Module) -> None:
        """Let attention in a part of a layer drop what one process drops of the probabilities of all heads."""
        heads_each = self._heads // self._mesh.size()
        first_head = heads_each * self._mesh.get_local_rank()
        heads = CutHeads(first_head, heads_each, self._heads, lambda: self._linears.is_inside)
        run = part.forward

        def with_cut_heads(*args: object, **kwargs: object) -> object:
            self._linears.leave()
            with heads:
                return run(*args, **kwargs)

        part.forward = with_cut_heads


def _cut_linear(module: nn.Linear, style: str, mesh: DeviceMesh, linears: CutLinears) -> None:
    """Cut a linear layer by columns or rows, and let its class's own forward run on this rank's part.

    torch keeps a weight as [outputs, inputs]. ``colwise`` cuts the outputs: dimension 0 of weight and bias. ``rowwise``
    cuts the inputs: dimension 1 of the weight; the bias is added once, to the sum over the ranks, so it stays whole.
    """
    for name, whole in list(module.named_parameters(recurse=False)):
        if style == COLUMN_STYLE:
            placement: Shard | Replicate = Shard(0)
        elif name == "weight":
            placement = Shard(1)
        else:
            placement = Replicate()
        shard = distribute_tensor(whole.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(shard, requires_grad=whole.requires_grad))

    def columns(x: Tensor) -> Tensor:
        return linears.columns(lambda taken: _with_local_parameters(module, taken), x)

    def rows(x: Tensor) -> Tensor:
        return linears.rows(lambda part: _with_local_parameters(module, part, bias=None), x, _local(module.bias))

    module.forward = columns if style == COLUMN_STYLE else rows  # type: ignore[assignment,method-assign]


def _with_local_parameters(module: nn.Module, x: Tensor, **replaced: None) -> Tensor:
    """Run the forward of a module's class on the local parts of its parameters.

    Args:
        replaced: parameters that the forward is to see as None.
    """
    parameters = dict(module._parameters)
    local_parts = {name: _local(whole) for name, whole in parameters.items()}
    # Not by setattr: a module takes only an nn.Parameter for a name of one, and these have to stay in the graph.
    vars(module)["_parameters"].update({**local_parts, **replaced})
    try:
        result: Tensor = type(module).forward(module, x)
    finally:
        module._parameters.update(parameters)
    return result


def _local(parameter: Tensor | None) -> Tensor | None:
    """Return this rank's part of a parameter; what is no DTensor is whole on every rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _cut_by_words(
    module: nn.Module | None, mesh: DeviceMesh, run: Callable[..., Tensor], shards: dict[int, nn.Parameter]
) -> VocabularyPart | None:
    """Cut an embedding or a head, and let its class's own forward run on the rows of this rank's words.

    Args:
        run: `embed_part` or `project_to_part`.
        shards: those made so far, by identity of the whole parameter, so that a tied parameter is cut once.

    Returns:
        This rank's words; None where another stage has the module.
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
        padding = getattr(module, "padding_idx", None)  # the row of this word gets no gradient
        if padding is not None:
            is_here = part.start <= padding < part.stop
            vars(module)["padding_idx"] = padding - part.start if is_here else None  # counted from this rank's rows
        try:
            return _with_local_parameters(module, x)
        finally:
            if padding is not None:
                vars(module)["padding_idx"] = padding

    module.forward = lambda x: run(of_class, x, part)
    return part


def partial_parameters(pretrained: PretrainedModel) -> frozenset[str]:
    """Return the names, in the decoder, of parameters that every rank has whole, with a part of their gradient."""
    plan = tensor_plan_of(pretrained)
    names = [name for name, _ in pretrained.base_model.named_parameters()]
    return frozenset(name for name in names if _style_of(name.rpartition(".")[0], plan) == PARTIAL_STYLE)


def tensor_plan_of(pretrained: PretrainedModel) -> Mapping[str, str]:
    """Return the styles of modules by name pattern, from the model's configuration; empty if it has no plan."""
    return dict(getattr(pretrained.config.get_text_config(), "base_model_tp_plan", None) or {})


def _style_of_linear(name: str, plan: Mapping[str, str]) -> str:
    """Return the style of a linear layer, which may be inside of one of PEFT's; empty if it is not cut.

    LoRA computes ``B(A(x))`` with a few numbers between. Only the matrix on the side that is cut is cut with the layer,
    so that these numbers are whole on every rank: B of a ``colwise`` layer, by its outputs; A of a ``rowwise`` one, by
    its inputs.
    """
    matrix = re.fullmatch(r"(.*)\.lora_([AB])\.[^.]+", name)
    if matrix is None:
        return _style_of(name.removesuffix(".base_layer"), plan)
    style = _style_of(matrix[1], plan)
    is_on_cut_side = (style, matrix[2]) in ((COLUMN_STYLE, "B"), (ROW_STYLE, "A"))
    return style if is_on_cut_side else ""


def _style_of(name: str, plan: Mapping[str, str]) -> str:
    """Return the style of a module, by the pattern of its name: ``layers.*.mlp`` of ``layers.3.mlp``; empty if none."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
