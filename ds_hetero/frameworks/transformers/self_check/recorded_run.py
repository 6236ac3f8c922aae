"""Run a model once, and record the output of every module for every token, and the gradient of the loss at each output.

Inputs of linear layers are recorded, too. If the inputs of a layer and the gradients at its outputs are right, the
gradients of its parameters are right after the sum over the ranks. So these gradients need no comparison, however large
they are. Gradients of other parameters: see `parameter_gradients`.

Dimension key: B rows, s tokens of the run.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_hetero.frameworks.transformers.model.model_checks import containers_of_experts
from ds_hetero.frameworks.transformers.self_check.parameter_gradients import SubstituteParameters, project
from ds_hetero.runtime.data.shards import Batch, Entries

_EMBEDDINGS = "inputs_embeds"
_LINEAR = (nn.Linear, Conv1D)
_MAX_TENSORS_PER_OUTPUT = 4  # tensors of an output that are recorded; hidden states come first


class ModuleOutput(NamedTuple):
    """Names one tensor among the outputs of a model's modules."""

    module: str  # name of the module in the model
    call: int  # number of the call, from 0, of a module that is called several times
    position: int  # of the tensor in the module's output


@dataclass(frozen=True)
class RecordedRun:
    """Record of a run. Tensors are [B, s, ...]."""

    outputs: dict[ModuleOutput, Tensor] = field(default_factory=dict)  # of modules, in the order in which these ended
    gradients: dict[ModuleOutput, Tensor] = field(default_factory=dict)  # of the loss, at the outputs
    inputs: dict[ModuleOutput, Tensor] = field(default_factory=dict)  # of linear layers; position 0
    projections: dict[str, Tensor] = field(default_factory=dict)  # of gradients, by parameter; `parameter_gradients`
    sizes: dict[str, float] = field(default_factory=dict)  # root mean squares of projections; added up over ranks
    loss: float | None = None  # None if the run has no loss


def record_run(
    model: nn.Module,
    inputs: Batch,
    shape: tuple[int, int],
    loss_of: Callable[[Any], Tensor | None],
    perturb: Callable[[Tensor], Tensor] | None = None,
    decoder: nn.Module | None = None,
    parameters: Sequence[str] = (),
) -> RecordedRun:
    """Run a model once, and the backward of its loss.

    Args:
        shape: (B, s) of the inputs. Tensors whose shape begins with (B, s), (1, s) or B * s are recorded.
        loss_of: computes the loss from the model's outputs; None if there is none.
        perturb: changes embeddings a little, to measure rounding noise or to break ties; None to leave them unchanged.
        decoder: text decoder of a model with towers; None for other models. Only inside it do tensors have ``shape``,
            and its ``inputs_embeds`` are the embeddings.
        parameters: names of the parameters whose gradients are projected.
    """
    recorder = _Recorder(model, shape, perturb, decoder)
    if inputs.get(_EMBEDDINGS) is not None:
        inputs = {**inputs, _EMBEDDINGS: recorder.as_leaf(inputs[_EMBEDDINGS])}
    substitutes = SubstituteParameters(model, parameters)
    with substitutes.substituted():  # also during the backward, in which checkpoints of tiles run forwards again
        with recorder.recording():
            outputs = model(**inputs)
        return recorder.differentiate(loss_of(outputs), substitutes.leaves)


class _Recorder:
    """Hooks that record the modules of a model during one run. Arguments: see `record_run`."""

    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, int],
        perturb: Callable[[Tensor], Tensor] | None,
        decoder: nn.Module | None,
    ) -> None:
        self._decoder = decoder
        excluded = _modules_inside_experts(model)
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            if module not in excluded:
                self._names[module] = name or type(model).__name__
        self._shape, self._perturb = shape, perturb
        self._num_calls: Counter[str] = Counter()
        self._outputs: dict[ModuleOutput, Tensor] = {}  # in the graph, for gradients
        self._copies: dict[ModuleOutput, Tensor] = {}  # of outputs, since a later module may change these in place
        self._inputs: dict[ModuleOutput, Tensor] = {}
        self._has_embedded = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside the context, record the outputs of the modules of a forward."""
        hooks = [module.register_forward_hook(self._record_call) for module in self._names]
        if self._decoder is not None:
            hooks.append(self._decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def differentiate(self, loss: Tensor | None, leaves: Mapping[str, Tensor]) -> RecordedRun:
        """Compute the gradients of the loss at all outputs and leaves, and return the record.

        Args:
            leaves: leaf tensors that replace parameters, by the parameter's name.
        """
        value = None if loss is None else float(loss.detach())
        run = RecordedRun(outputs=self._copies, inputs=self._inputs, loss=value)
        differentiable = {place: tensor for place, tensor in self._outputs.items() if tensor.requires_grad}
        if loss is not None and loss.requires_grad and differentiable:
            targets = [*differentiable.values(), *leaves.values()]
            gradients = torch.autograd.grad(loss, targets, allow_unused=True)
            gradients_of_leaves = gradients[len(differentiable) :]
            for place, gradient in zip(differentiable, gradients, strict=False):
                if gradient is not None:
                    run.gradients[place] = self._by_token(gradient)
            for name, gradient in zip(leaves, gradients_of_leaves, strict=True):
                if gradient is not None:
                    run.projections[name] = project(name, gradient)
                    run.sizes[name] = float(run.projections[name].square().mean().sqrt())
        self._outputs = {}  # free the graph
        return run

    def _record_call(self, module: nn.Module, args: object, output: object) -> object:
        """Forward hook of every module: record its output, and its input if it is a linear layer.

        Returns:
            The output; for an embedding module, as a leaf of the graph, and perturbed.
        """
        if self._decoder is None and isinstance(output, Tensor) and self._is_embedding_call(module, args, output):
            output = self.as_leaf(output)
        name = self._names[module]
        call = self._num_calls[name]
        self._num_calls[name] += 1
        if isinstance(module, _LINEAR):
            self._record_input(ModuleOutput(name, call, 0), args)
        for position, tensor in zip(range(_MAX_TENSORS_PER_OUTPUT), _tensors_in(output), strict=False):
            if self._is_recorded(tensor):
                place = ModuleOutput(name, call, position)
                self._copies[place] = self._by_token(tensor.detach()).clone()
                is_shared_by_rows = tensor.shape[0] < self._shape[0]  # its gradient is a sum over the rows
                if not is_shared_by_rows:
                    self._outputs[place] = tensor
        return output

    def _record_input(self, place: ModuleOutput, args: object) -> None:
        for tensor in _tensors_in(args):
            if self._is_recorded(tensor):
                self._inputs[place] = self._by_token(tensor.detach()).clone()

    def _is_embedding_call(self, module: nn.Module, args: Any, output: Tensor) -> bool:
        """Return True if a call turned token ids into embeddings.

        That is true for an nn.Embedding, and for any module that turns integers into floating numbers, such as PEFT's
        replacements of embeddings. It is false for a module around an embedding: the output of such a module requires
        gradients already, because the embedding inside was made a leaf.
        """
        takes_ids = bool(args) and isinstance(args[0], Tensor) and not args[0].is_floating_point()
        has_gradients = output.requires_grad and self._has_embedded
        is_embedding = isinstance(module, nn.Embedding) or (takes_ids and not has_gradients)
        return is_embedding and output.is_floating_point()

    def _before_decoder(self, decoder: nn.Module, args: object, kwargs: Entries) -> Any:
        """Pre-hook of the text decoder of a model with towers: perturb its embeddings."""
        if kwargs.get(_EMBEDDINGS) is not None:
            kwargs = {**kwargs, _EMBEDDINGS: self.as_leaf(kwargs[_EMBEDDINGS])}
        return args, kwargs

    def as_leaf(self, embeddings: Tensor) -> Tensor:
        """Return the embeddings, perturbed, as tensors that require gradients although no parameter does.

        The result is a copy of a leaf, because a model may change embeddings in place, which autograd forbids for
        leaves.
        """
        if self._perturb is not None and tuple(embeddings.shape[:2]) == self._shape:
            embeddings = self._perturb(embeddings)
        self._has_embedded = True
        return embeddings if embeddings.requires_grad else embeddings.detach().requires_grad_().clone()

    def _is_recorded(self, tensor: Tensor) -> bool:
        """Return True for a floating tensor with a value per token: [B, s, ...], [1, s, ...] or [B * s, ...]."""
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return False
        batch_size, tokens = self._shape
        return tuple(tensor.shape[:2]) in (self._shape, (1, tokens)) or tensor.shape[0] == batch_size * tokens

    def _by_token(self, tensor: Tensor) -> Tensor:
        """[1, s, ...] or [B * s, ...] -> [B, s, ...]."""
        batch_size, tokens = self._shape
        if tuple(tensor.shape[:2]) == (1, tokens):
            return tensor.expand(batch_size, *tensor.shape[1:])
        rest = tensor.shape[2:] if tuple(tensor.shape[:2]) == self._shape else tensor.shape[1:]
        return tensor.reshape(*self._shape, *rest)


def _modules_inside_experts(model: nn.Module) -> set[nn.Module]:
    """Return the modules inside containers of experts, which are not recorded.

    A container calls a module once for each expert that any token chose, so calls with the same number in two runs may
    belong to different tokens. The output of the container itself is recorded.
    """
    containers = containers_of_experts(model)
    return {module for container in containers for module in container.modules() if module is not container}


def _tensors_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors_in(value)
