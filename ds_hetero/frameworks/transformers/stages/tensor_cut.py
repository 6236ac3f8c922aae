"""Shard the layers of one stage by tensor parallelism, according to transformers' plan of the model.

Parameters are torch's DTensors, which say how they are sharded. But layers compute with the local tensors, for two
reasons: with DTensors, a layer takes the host several times as long, and the gradient of an input is summed over the
ranks once for every layer that takes it.

Embedding and head are sharded by words: by the rows of their weights, one for each entry of the vocabulary.
transformers' plans do not do this: their head gathers all logits on every rank.

In tensor groups, the ranks also share the tokens between attention and MLP, see `ds_hetero.runtime.shared_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ds_hetero.frameworks.transformers.model.model_checks import head_counts, pretrained_of
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.frameworks.transformers.stages.parallel_regions import ParallelRegions
from ds_hetero.frameworks.transformers.stages.parts import Absent, parts_of
from ds_hetero.frameworks.transformers.stages.random_draws import draws_randomly
from ds_hetero.runtime.parallel_dropout import ParallelHeadDropout, drop_part
from ds_hetero.runtime.parallel_linear import Linears, ParallelLinears, SummandLinears
from ds_hetero.runtime.vocabulary import VocabularyPart, embed_part, project_to_part

COLUMN_STYLE, ROW_STYLE = "colwise", "rowwise"
# Weights that every rank has whole, but of whose gradient each rank computes only a summand, such as norms of heads.
PARTIAL_STYLE = "replicated_with_grad_allreduce"


class TensorCut:
    """Shards the model on the ranks of a ``"tensor"`` stage, or of a tensor group.

    Args:
        mesh: of these ranks, with one dimension.
        shares_tokens: whether the ranks share the tokens of norms and residuals, too. Only for models that
            `may_share_tokens` accepts.

    Attributes:
        words: the entries of the vocabulary whose logits this rank computes; None if another stage has the head.
        draws: True if forwards in training draw random numbers. Then every rank draws the numbers of the whole
            layer, and keeps its part, so that the ranks together drop the same values as one process.
    """

    def __init__(self, pretrained: PretrainedModel, mesh: DeviceMesh, *, shares_tokens: bool = False) -> None:
        self.group = mesh.get_group()
        self.draws = draws_randomly(pretrained)
        self.regions = ParallelRegions(self.group) if shares_tokens else None
        self._plan, self._mesh = tensor_plan_of(pretrained), mesh
        self._linears: Linears = ParallelLinears(self.group) if self.regions is None else SummandLinears(self.group)
        # Layers whose dropout of heads was cut. On a re-plan a layer may leave this rank, and come back later.
        self._layers_with_cut_heads = WeakSet[nn.Module]()
        self._num_heads = head_counts(pretrained)[0]
        name = parts_of(pretrained).layers
        layers = list(getattr(pretrained.base_model, name))
        for index, layer in enumerate(layers):
            self.cut_layer(layer, f"{name}.{index}")
        shards: dict[int, nn.Parameter] = {}
        _cut_by_words(pretrained.get_input_embeddings(), mesh, embed_part, shards)
        self.words = _cut_by_words(pretrained.get_output_embeddings(), mesh, project_to_part, shards)
        self.share_tokens_in(layers)

    def share_tokens_in(self, layers: Iterable[nn.Module]) -> None:
        """Share the tokens of norms and residuals between the first and the last layer of this stage, if at all.

        Args:
            layers: of the decoder; those of other stages are `Absent`.
        """
        if self.regions is not None:
            stage_layers = [layer for layer in layers if not isinstance(layer, Absent)]
            self.regions.share_between(stage_layers[0], stage_layers[-1])

    def cut_layer(self, layer: nn.Module, name: str) -> None:
        """Replace the parameters of a layer by this rank's shards.

        Args:
            name: name of the layer in the decoder, such as ``layers.3``.
        """
        for module_name, module in layer.named_modules(prefix=name):
            if not isinstance(module, nn.Linear):
                continue
            style = _style_of_linear(module_name, self._plan)
            if style in (COLUMN_STYLE, ROW_STYLE):
                _cut_linear(module, style, self._mesh, self._linears)
            if self.draws and ".lora_A." in module_name:
                dropout = module_name.removeprefix(f"{name}.").replace(".lora_A.", ".lora_dropout.")
                self._cut_adapter_dropout(module, layer.get_submodule(dropout), style)
        if self.draws and layer not in self._layers_with_cut_heads:
            # Wrap the children, not the layer: recomputation runs the layer's own forward again, and has to go through
            # the wrappers, too.
            for part in layer.children():
                self._cut_heads(part)
        self._layers_with_cut_heads.add(layer)
        if self.regions is not None:
            self.regions.wrap_layer(layer)

    def _cut_adapter_dropout(self, matrix: nn.Linear, dropout: nn.Module, style: str) -> None:
        """Let the dropout before LoRA's first matrix drop the same values of the input as in one process.

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
        """Let a layer's attention drop those probabilities of this rank's heads that one process would drop."""
        heads_each = self._num_heads // self._mesh.size()
        first_head = heads_each * self._mesh.get_local_rank()
        heads = ParallelHeadDropout(first_head, heads_each, self._num_heads, lambda: self._linears.is_inside)
        run = part.forward

        def with_cut_heads(*args: object, **kwargs: object) -> object:
            self._linears.leave()
            with heads:
                return run(*args, **kwargs)

        part.forward = with_cut_heads


def _cut_linear(module: nn.Linear, style: str, mesh: DeviceMesh, linears: Linears) -> None:
    """Cut a linear layer by columns or rows, and let the forward of its class run on this rank's part.

    torch keeps a weight as [outputs, inputs]. ``colwise`` cuts the outputs: dimension 0 of weight and bias. ``rowwise``
    cuts the inputs: dimension 1 of the weight; the bias is added once, to the sum over the ranks, so it stays whole.
    """
    for name, full_parameter in list(module.named_parameters(recurse=False)):
        if style == COLUMN_STYLE:
            placement: Shard | Replicate = Shard(0)
        elif name == "weight":
            placement = Shard(1)
        else:
            placement = Replicate()
        shard = distribute_tensor(full_parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(shard, requires_grad=full_parameter.requires_grad))

    def columns(x: Tensor) -> Tensor:
        return linears.columns(lambda x: _with_local_parameters(module, x), x)

    def rows(x: Tensor) -> Tensor:
        return linears.rows(lambda x: _with_local_parameters(module, x, without=("bias",)), x, _local_part(module.bias))

    module.forward = columns if style == COLUMN_STYLE else rows  # type: ignore[assignment,method-assign]


def _with_local_parameters(module: nn.Module, x: Tensor, without: Collection[str] = ()) -> Tensor:
    """Run the forward of a module's class on the local parts of its parameters.

    Args:
        without: names of parameters that are None during the forward.
    """
    parameters = dict(module._parameters)
    local_parts = {name: _local_part(full_parameter) for name, full_parameter in parameters.items()}
    # Not by setattr, which accepts only an nn.Parameter, but the local tensors have to stay in the graph.
    vars(module)["_parameters"].update({**local_parts, **dict.fromkeys(without)})
    try:
        result: Tensor = type(module).forward(module, x)
    finally:
        module._parameters.update(parameters)
    return result


def _local_part(parameter: Tensor | None) -> Tensor | None:
    """Return this rank's part of a DTensor; a tensor that is no DTensor is whole on every rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _cut_by_words(
    module: nn.Module | None, mesh: DeviceMesh, run: Callable[..., Tensor], shards: dict[int, nn.Parameter]
) -> VocabularyPart | None:
    """Cut the weight of an embedding or a head by rows, and let the forward of its class run on this rank's rows.

    Args:
        run: `embed_part` or `project_to_part`.
        shards: the shards that were made so far, by id of the whole parameter, so that a tied parameter is cut
            once.

    Returns:
        The entries of the vocabulary whose rows this rank has; None if another stage has the module.
    """
    if module is None or isinstance(module, Absent):
        return None
    part = VocabularyPart.of(mesh.get_group(), module.get_parameter("weight").shape[0])
    for name, full_parameter in list(module.named_parameters(recurse=False)):
        if id(full_parameter) not in shards:
            shard = distribute_tensor(full_parameter.detach(), mesh, [Shard(0)])
            shards[id(full_parameter)] = nn.Parameter(shard, requires_grad=full_parameter.requires_grad)
        setattr(module, name, shards[id(full_parameter)])

    def run_class_forward(x: Tensor) -> Tensor:
        padding = getattr(module, "padding_idx", None)  # the row of this word gets no gradient
        if padding is not None:
            is_here = part.start <= padding < part.stop
            vars(module)["padding_idx"] = padding - part.start if is_here else None  # counted from this rank's rows
        try:
            return _with_local_parameters(module, x)
        finally:
            if padding is not None:
                vars(module)["padding_idx"] = padding

    module.forward = lambda x: run(run_class_forward, x, part)
    return part


def partial_parameters(pretrained: PretrainedModel) -> frozenset[str]:
    """Return the names, in the decoder, of parameters with `PARTIAL_STYLE`."""
    plan = tensor_plan_of(pretrained)
    names = [name for name, _ in pretrained.base_model.named_parameters()]
    return frozenset(name for name in names if _style_of(name.rpartition(".")[0], plan) == PARTIAL_STYLE)


def may_share_tokens(model: nn.Module) -> bool:
    """Whether the ranks of a tensor group may share the tokens of norms and residuals.

    Not with adapters, whose uncut matrices would add their gradient of a region's input once on every rank; not with
    dropout, of whose mask every rank would need its tokens' part; nor if a child of a layer begins or ends amid
    sharded activations, since then it is no region. In a region all linear layers have to be sharded: what every rank
    computes whole would be added up once for each rank.
    """
    pretrained = pretrained_of(model)
    if getattr(model, "peft_config", None) or draws_randomly(pretrained):
        return False
    plan, layers = tensor_plan_of(pretrained), parts_of(pretrained).layers
    for index, layer in enumerate(getattr(pretrained.base_model, layers)):
        for name, child in layer.named_children():
            styles = set()
            for module_name, module in child.named_modules(prefix=f"{layers}.{index}.{name}"):
                if isinstance(module, nn.Linear):
                    styles.add(_style_of_linear(module_name, plan))
            is_region, is_whole = styles == {COLUMN_STYLE, ROW_STYLE}, styles <= {""}
            if not is_region and not is_whole:
                return False
    return True


def tensor_plan_of(pretrained: PretrainedModel) -> Mapping[str, str]:
    """Return the style of each name pattern of modules, from the model's configuration; empty if it has no plan.

    For example, Llama's plan has {"layers.*.mlp.down_proj": "rowwise"}.
    """
    return dict(getattr(pretrained.config.get_text_config(), "base_model_tp_plan", None) or {})


def _style_of_linear(name: str, plan: Mapping[str, str]) -> str:
    """Return the style of a linear layer, which may be inside a layer of PEFT; empty if it is not cut.

    LoRA computes ``B(A(x))``, and every rank has all of the few outputs of A. So only one of the matrices is cut with
    the layer: B of a ``colwise`` layer, by its outputs; A of a ``rowwise`` layer, by its inputs.
    """
    matrix = re.fullmatch(r"(.*)\.lora_([AB])\.[^.]+", name)
    if matrix is None:
        return _style_of(name.removesuffix(".base_layer"), plan)
    style = _style_of(matrix[1], plan)
    is_on_cut_side = (style, matrix[2]) in ((COLUMN_STYLE, "B"), (ROW_STYLE, "A"))
    return style if is_on_cut_side else ""


def _style_of(name: str, plan: Mapping[str, str]) -> str:
    """Return the style of a module; empty if it has none. The pattern of ``layers.3.mlp`` is ``layers.*.mlp``."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
