"""One run of a model: what every module made of every token, and the gradient of the loss at it.

Equal inputs of a linear layer and equal gradients at its outputs imply equal gradients of its parameters after the sum
over the ranks; so these need not be looked at, however large they are. Of other parameters see `parameter_gradients`.

Runs of a model that leave everything as it was: gradients, hooks of ZeRO, buffers, modes, random state.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_hetero.frameworks.transformers.model.model_checks import containers_of_experts
from ds_hetero.frameworks.transformers.self_check.parameter_gradients import Leaves, project
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.evaluation_mode import packs_in_evaluation

_EMBEDDINGS = "inputs_embeds"
_LINEAR = (nn.Linear, Conv1D)
_MOST_TENSORS = 4  # of one output that are looked at: hidden states come first


class ModuleOutput(NamedTuple):
    """An output of a module."""

    module: str  # its name in the model
    call: int  # number of the call, where a module is called several times
    position: int  # of the tensor in what it returned


@dataclass(frozen=True)
class RecordedRun:
    """Record of a run."""

    outputs: dict[ModuleOutput, Tensor] = field(default_factory=dict)  # [B, s, ...] by place, as the modules finished
    gradients: dict[ModuleOutput, Tensor] = field(default_factory=dict)  # of the loss, by place of an output
    inputs: dict[ModuleOutput, Tensor] = field(default_factory=dict)  # of linear layers; position 0
    projections: dict[str, Tensor] = field(default_factory=dict)  # of parameters' gradients, see `parameter_gradients`
    sizes: dict[str, float] = field(default_factory=dict)  # of projections: root mean square; added up over ranks
    loss: float | None = None  # None if the run had none


def record_run(
    model: nn.Module,
    inputs: Batch,
    shape: tuple[int, int],
    loss_of: Callable[[Any], Tensor | None],
    shake: Callable[[Tensor], Tensor] | None = None,
    decoder: nn.Module | None = None,
    parameters: Sequence[str] = (),
) -> RecordedRun:
    """Run a model once, and the backward of its loss.

    Args:
        shape: (B, s) of the inputs; outputs that begin with it, with (1, s) or with B * s are recorded.
        loss_of: takes what the model returned.
        shake: changes the output of the embedding modules, or embeddings among the inputs, to see what rounding does or
            to move ties.
        decoder: of a model with towers, whose embeddings are what this is given; it alone has outputs of ``shape``.
        parameters: names of those whose gradients are projected.
    """
    recorder = _Recorder(model, shape, shake, decoder)
    if inputs.get(_EMBEDDINGS) is not None:
        inputs = {**inputs, _EMBEDDINGS: recorder.as_leaf(inputs[_EMBEDDINGS])}
    second = Leaves(model, parameters)
    with second.running():  # in the backward too, which runs what is checkpointed once more (tiles)
        with recorder.recording():
            returned = model(**inputs)
        return recorder.finish(loss_of(returned), second.leaves)


class _Recorder:
    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, int],
        shake: Callable[[Tensor], Tensor] | None,
        decoder: nn.Module | None,
    ) -> None:
        self._decoder = decoder
        inside = _inside_experts(model)
        named = ((module, name) for name, module in model.named_modules() if module not in inside)
        self._names = {module: name or type(model).__name__ for module, name in named}
        self._shape, self._shake = shape, shake
        self._num_calls: Counter[str] = Counter()
        self._tensors: dict[ModuleOutput, Tensor] = {}
        self._copies: dict[ModuleOutput, Tensor] = {}  # of outputs that a later module may change in place
        self._inputs: dict[ModuleOutput, Tensor] = {}
        self._has_embedded = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [module.register_forward_hook(self._see) for module in self._names]
        if self._decoder is not None:
            hooks.append(self._decoder.register_forward_pre_hook(self._at_door, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, loss: Tensor | None, leaves: Mapping[str, Tensor]) -> RecordedRun:
        value = None if loss is None else float(loss.detach())
        run = RecordedRun(outputs=self._copies, inputs=self._inputs, loss=value)
        differentiable = {place: tensor for place, tensor in self._tensors.items() if tensor.requires_grad}
        if loss is not None and loss.requires_grad and differentiable:
            ends = [*differentiable.values(), *leaves.values()]
            gradients = torch.autograd.grad(loss, ends, allow_unused=True)
            for place, gradient in zip(differentiable, gradients, strict=False):
                if gradient is not None:
                    run.gradients[place] = self._by_token(gradient)
            for name, gradient in zip(leaves, gradients[len(differentiable) :], strict=True):
                if gradient is not None:
                    run.projections[name] = project(name, gradient)
                    run.sizes[name] = float(run.projections[name].square().mean().sqrt())
        self._tensors = {}
        return run

    def _see(self, module: nn.Module, args: object, output: object) -> object:
        if self._decoder is None and isinstance(output, Tensor) and self._embeds(module, args, output):
            output = self.as_leaf(output)
        name = self._names[module]
        call = self._num_calls[name]
        self._num_calls[name] += 1
        if isinstance(module, _LINEAR):
            self._see_input(ModuleOutput(name, call, 0), args)
        for position, tensor in zip(range(_MOST_TENSORS), _tensors_in(output), strict=False):
            if tensor.is_floating_point() and tensor.dim() >= 2 and self._is_by_token(tensor):
                place = ModuleOutput(name, call, position)
                self._copies[place] = self._by_token(tensor.detach()).clone()
                if tensor.shape[0] >= self._shape[0]:  # gradients at what all rows share add up over the rows
                    self._tensors[place] = tensor
        return output

    def _see_input(self, place: ModuleOutput, args: object) -> None:
        for tensor in _tensors_in(args):
            if tensor.is_floating_point() and tensor.dim() >= 2 and self._is_by_token(tensor):
                self._inputs[place] = self._by_token(tensor.detach()).clone()

    def _embeds(self, module: nn.Module, args: Any, output: Tensor) -> bool:
        """Whether a module makes floating numbers of integers, as embeddings do and what PEFT puts in their place.

        Around an embedding that has been called, gradients flow already.
        """
        reads_tokens = bool(args) and isinstance(args[0], Tensor) and not args[0].is_floating_point()
        flow = output.requires_grad and self._has_embedded
        is_first = isinstance(module, nn.Embedding) or (reads_tokens and not flow)
        return is_first and output.is_floating_point()

    def _at_door(self, decoder: nn.Module, args: object, kwargs: Entries) -> Any:
        if kwargs.get(_EMBEDDINGS) is not None:
            kwargs = {**kwargs, _EMBEDDINGS: self.as_leaf(kwargs[_EMBEDDINGS])}
        return args, kwargs

    def as_leaf(self, output: Tensor) -> Tensor:
        """Let gradients end here, as the parameters take none; a copy of the leaf, which models may change in place."""
        if self._shake is not None and tuple(output.shape[:2]) == self._shape:
            output = self._shake(output)
        self._has_embedded = True
        return output if output.requires_grad else output.detach().requires_grad_().clone()

    def _is_by_token(self, tensor: Tensor) -> bool:
        batch_size, tokens = self._shape
        return tuple(tensor.shape[:2]) in (self._shape, (1, tokens)) or tensor.shape[0] == batch_size * tokens

    def _by_token(self, tensor: Tensor) -> Tensor:
        batch_size, tokens = self._shape
        if tuple(tensor.shape[:2]) == (1, tokens):
            return tensor.expand(batch_size, *tensor.shape[1:])
        rest = tensor.shape[2:] if tuple(tensor.shape[:2]) == self._shape else tensor.shape[1:]
        return tensor.reshape(*self._shape, *rest)


def _inside_experts(model: nn.Module) -> set[nn.Module]:
    """Modules that a container of experts calls once for each expert that any token chose.

    Calls in two runs are not of the same tokens; what the container returns is looked at.
    """
    containers = containers_of_experts(model)
    return {module for container in containers for module in container.modules() if module is not container}


def _tensors_in(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors_in(value)


_LARGEST_KEPT_BUFFER = 1 << 20  # elements; statistics are small, tables of positions never change


@contextlib.contextmanager
def traceless(model: nn.Module, *, in_training: bool = False) -> Iterator[None]:
    """Let runs and backwards inside leave no trace in ``model`` or in the process; in evaluation.

    Parameters take no gradients inside, so no node of autograd ends at one of them and no gradient hook of any ZeRO
    stage fires. Full backward hooks are taken off, since ZeRO-3 fills its buckets in those of mixtures of experts.
    Modes are set by attribute: ``eval()`` may be overridden, and this engine takes note of it. ZeRO-3's gathering of
    parameters runs as in any forward. Numbers that modules keep as attributes, such as counts of their forwards in
    training, are put back.

    Args:
        in_training: leave every module in its mode; dropout is not switched off.
    """
    modules, parameters = list(model.modules()), list(model.parameters())
    modes = [(module, module.training, getattr(module, "gradient_checkpointing", None)) for module in modules]
    wants_gradient = [parameter.requires_grad for parameter in parameters]
    buffers = [(b, b.detach().clone()) for b in model.buffers() if b.numel() <= _LARGEST_KEPT_BUFFER]
    hooks = [(module, module._backward_hooks, module._backward_pre_hooks) for module in modules]
    # With a number a module may replace a buffer: the length that rotary embeddings are made for, and frequencies.
    numbers = [(module, _numbers_of(module), dict(module._buffers)) for module in modules]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    devices = sorted({parameter.device.index or 0 for parameter in parameters if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            for module, mode, checkpoints in modes:
                module.training = mode and (in_training or packs_in_evaluation(module))
                if checkpoints:
                    module.__dict__["gradient_checkpointing"] = False
            for module, backward, pre_backward in hooks:
                module._backward_hooks, module._backward_pre_hooks = type(backward)(), type(pre_backward)()
            for parameter in parameters:
                parameter.requires_grad_(False)
            with torch.enable_grad():
                yield
        finally:
            for parameter, wanted in zip(parameters, wants_gradient, strict=True):
                parameter.requires_grad_(wanted)
            for module, backward, pre_backward in hooks:
                module._backward_hooks, module._backward_pre_hooks = backward, pre_backward
            for module, mode, checkpoints in modes:
                module.training = mode
                if checkpoints:
                    module.__dict__["gradient_checkpointing"] = checkpoints
            for module, of_module, buffers_of_module in numbers:
                vars(module).update(of_module)
                module._buffers.update(buffers_of_module)
            _put_back(buffers)
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def _numbers_of(module: nn.Module) -> dict[str, bool | int | float]:
    return {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float))}


@torch.no_grad()
def _put_back(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in buffers:
        if not torch.equal(buffer, value):
            buffer.copy_(value)
