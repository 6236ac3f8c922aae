"""Record what forwards of training leave for the weighing of their loss, if ranks take different batches.

The weight of a loss is read from its graph, see `unlike_losses`. That needs what the loss was computed from: the
arguments and the outputs of the forward, and buffers that the forward has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd.graph import Node

from ds_hetero.engine.trained.forward_arguments import NO_ARGUMENTS, ForwardArguments
from ds_hetero.engine.trained.loss_operations import LossOperations
from ds_hetero.engine.trained.whole_model_checks import expect_no_statistics
from ds_hetero.runtime.changed_buffers import ChangedBuffers
from ds_hetero.runtime.data.batch_trial import BatchTrial
from ds_hetero.runtime.data.loss_units import Batch, loss_in, tensors_in


class RecordedForwards:
    """Records of the forwards of a module, made by hooks that change no result.

    Attributes:
        arguments: the arguments of the latest forward of training; empty after the backward of that forward.
        output_nodes: graph nodes of the outputs of forwards of training since the latest backward.
        operations: operations of the losses so far.
        trial: learns the arguments of forwards of training; None unless batches are tried, see `BatchMemory`.
        has_run: True from a forward of training until its loss has been scaled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.arguments = NO_ARGUMENTS
        self.output_nodes: set[Node] = set()
        self.operations = LossOperations()
        self.trial: BatchTrial | None = None
        self.has_run = False
        self._buffers = ChangedBuffers(model.named_buffers)
        self._is_paused = False
        self._is_checked = False  # whether its layers were checked for batch statistics
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._hooks = before, model.register_forward_hook(self._after)

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context, record no forward, for example during a probe."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def changed_buffers(self) -> dict[str, float]:
        """Return, by name, the sum of the elements of each buffer that has changed since the last call."""
        return self._buffers.look()

    def clear(self) -> None:
        """Forget the forwards of a loss, after its backward."""
        self.output_nodes = set()
        self.arguments = NO_ARGUMENTS

    def __deepcopy__(self, memo: dict[int, object]) -> RecordedForwards:
        """Return this object: the hooks of a copied module use it, too."""
        return self

    @property
    def _is_of_training(self) -> bool:
        """Whether the running forward is one of training, not of a probe of samples or a trial of memory."""
        is_tried = self._is_paused or (self.trial is not None and self.trial.is_running)
        return self._model.training and torch.is_grad_enabled() and not is_tried

    def _before(self, model: nn.Module, args: tuple[Batch, ...], kwargs: dict[str, Batch]) -> None:
        """Record the arguments of a forward of training."""
        if not self._is_of_training:
            return
        self.has_run = True
        if self.trial is not None:
            self.trial.note(args, kwargs)
        if not self.arguments.kwargs and not self.arguments.args:  # the first forward since a backward
            self.operations.begin_graph()
        self.arguments = ForwardArguments(args, kwargs)
        if not self._is_checked:
            expect_no_statistics(model)
            self._is_checked = True
        if not self._buffers.is_watching:
            self.changed_buffers()

    def _after(self, model: nn.Module, args: object, outputs: object) -> None:
        """Record the graph nodes of the outputs of a forward of training."""
        if self._is_of_training:
            tensors = [*tensors_in(outputs)]
            loss = loss_in(outputs)
            if loss is not None:
                tensors.append(loss)
            self.output_nodes |= {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
