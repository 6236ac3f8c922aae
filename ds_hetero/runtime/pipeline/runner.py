"""Run the 1F1B schedule on one rank: the passes of its stage in order, overlapped with the sends to its neighbours.

A step runs every micro-batch of the rank's pipeline forward and backward. Between its two passes, the input and the
output of the stage are kept for a micro-batch. A send is waited for when its stage is so many passes ahead that the
message must have arrived. Before its first message a step connects the ranks that will send to each other.

On NCCL a posted message occupies the device until its other end is posted as well. Until then everything that needs an
idle device blocks, such as returning memory to the driver, or loading a module. Several stages may need that at the
same time. So when a stage begins a pass, none of the messages that it has posted may depend on that pass, or on a pass
of a stage that is blocked in turn:

    activations  are received in the pass that needs them. If the receive were posted earlier, this stage could block
                 before it sends a gradient; the stage before would wait for that gradient, and never compute the
                 activations.
    gradients    are received as soon as the stage after has all outputs that it needs before it sends them: it may
                 need an idle device after its send.
    buckets      of the gradient synchronizer are sent after the last input gradient: their other members may wait
                 for it.

Transfers still run during the pass before, since the host posts them while the device computes that pass. On gloo,
where messages do not occupy the device, activations are received one pass ahead.

Dimension key: b rows of a micro-batch, L tokens of its sequences, s tokens of this rank, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_hetero.runtime.backends import pairs_by_order
from ds_hetero.runtime.pipeline.batches import StageBatch
from ds_hetero.runtime.pipeline.stage_transfers import Boundary, BoundaryGroups, Receiving, Sending
from ds_hetero.runtime.step_clock import UNTIMED, Clock
from ds_hetero.values.plans import Pipeline, Plan
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD, Action, gradients_due, one_f_one_b

StageCompute = Callable[[StageBatch, Tensor | None], Tensor]
"""Forward of a stage's layers for one micro-batch, for this rank's tokens.

Takes the micro-batch, and [b, s, H] from the stage before, None on the first stage. Returns [b, s, H]; on the last
stage a scalar, this rank's summand of the loss.
"""


class Synchronizer(Protocol):
    """Synchronizes gradients between pipelines; see `ds_hetero.gradient_sync.sync`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside, and send none."""

    def held_back(self) -> AbstractContextManager[None]:
        """Send gradients only at the end of the context."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """Both directions of both boundaries of this rank's stage."""

    pipeline: Pipeline
    stage: int  # index of its stage
    inputs: Boundary | None = None  # activations from the stage before; None on the first
    input_gradients: Boundary | None = None  # gradients to the stage before
    outputs: Boundary | None = None  # activations to the stage after; None on the last
    output_gradients: Boundary | None = None  # gradients from the stage after


def neighbours_of(
    plan: Plan, rank: int, groups: dict[tuple[int, int], BoundaryGroups], device: torch.device
) -> Neighbours:
    """Return the boundaries of the stage of ``rank``, with ``groups`` from `make_boundary_groups`."""
    place = plan.place_of(rank)
    assert place is not None
    i, j = place  # index of the pipeline, and of the stage in it
    pipeline = plan.pipelines[i]
    stage = pipeline.stages[j]
    inputs = input_gradients = outputs = output_gradients = None
    if j > 0:
        earlier_stage, boundary_groups = pipeline.stages[j - 1], groups[i, j - 1]
        inputs = Boundary(earlier_stage, stage, rank, boundary_groups.activations, boundary_groups.copies, device)
        groups_back = boundary_groups.gradients, boundary_groups.copies
        input_gradients = Boundary(stage, earlier_stage, rank, *groups_back, device)
    if j + 1 < len(pipeline.stages):
        later_stage, boundary_groups = pipeline.stages[j + 1], groups[i, j]
        outputs = Boundary(stage, later_stage, rank, boundary_groups.activations, boundary_groups.copies, device)
        groups_back = boundary_groups.gradients, boundary_groups.copies
        output_gradients = Boundary(later_stage, stage, rank, *groups_back, device)
    return Neighbours(
        pipeline=pipeline,
        stage=j,
        inputs=inputs,
        input_gradients=input_gradients,
        outputs=outputs,
        output_gradients=output_gradients,
    )


class PipelineRunner:
    """Runs the micro-batches of one step through this rank's stage.

    Args:
        neighbours: of the stage, see `neighbours_of`.
        compute: the forward of the stage's layers.
        width: H.
        dtype: of the activations.
        clock: times the passes of training, not those of evaluation.
    """

    def __init__(
        self, neighbours: Neighbours, compute: StageCompute, width: int, dtype: torch.dtype, clock: Clock = UNTIMED
    ) -> None:
        self._neighbours, self._compute = neighbours, compute
        self._width, self._dtype, self._clock = width, dtype, clock

    def train(self, batches: Sequence[StageBatch], sync: Synchronizer | None = None) -> Tensor | None:
        """Run all passes; return the sum of this rank's losses on the last stage, None on others.

        Args:
            sync: sends gradients in the last backward, or after it; None if they are not synchronized here.

        Caller: every rank of the pipeline, with the same micro-batches.

        Raises:
            PeerError: another rank is gone.
        """
        in_flight = self._neighbours.pipeline.in_flight(self._neighbours.stage)
        return self._run(batches, one_f_one_b(in_flight, len(batches)), sync)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[StageBatch]) -> Tensor | None:
        """Run the forwards only; arguments and result are those of `train`."""
        return self._run(batches, [Action(FORWARD, k) for k in range(len(batches))], None)

    def _run(
        self,
        batches: Sequence[StageBatch],
        actions: Sequence[Action],
        sync: Synchronizer | None,
    ) -> Tensor | None:
        neighbours = self._neighbours
        has_backwards = any(action.kind == BACKWARD for action in actions)
        self._connect(batches, has_backwards)
        inputs = _Inbox(neighbours.inputs, batches, self._width, self._dtype)
        gradients = _Inbox(neighbours.output_gradients if has_backwards else None, batches, self._width, self._dtype)
        in_flight_after = 1 if neighbours.outputs is None else neighbours.pipeline.in_flight(neighbours.stage + 1)
        outbox = _Outbox(neighbours.pipeline.in_flight(0))
        # Input and output of the stage, for micro-batches between their forward and backward.
        activations: dict[int, tuple[Tensor | None, Tensor]] = {}
        total: Tensor | None = None
        clock = self._clock if has_backwards else UNTIMED
        for kind, k in actions:
            clock.start_pass(kind, k)
            if kind == FORWARD:
                hidden = inputs.take(k)
                if inputs.may_receive_ahead:
                    inputs.post_receives(k + 2)
                clock.mark()
                if hidden is not None and torch.is_grad_enabled():
                    hidden.requires_grad_()
                output = self._compute(batches[k], hidden)
                clock.mark()
                activations[k] = hidden, output
                if neighbours.outputs is None:
                    total = output.detach().clone() if total is None else total + output.detach()
                else:
                    outbox.put(neighbours.outputs.send(output.detach(), batches[k].length))
                    gradients.post_receives(gradients_due(in_flight_after, k + 1, len(batches)))
                if not torch.is_grad_enabled():
                    activations.clear()
            else:
                hidden, output = activations.pop(k)
                gradient = gradients.take(k)
                clock.mark()
                is_last, sends_nothing = k == len(batches) - 1, neighbours.input_gradients is None
                with _sync_context(sync, is_last=is_last, sends_nothing=sends_nothing):
                    if output.requires_grad:  # False if all layers so far are frozen
                        torch.autograd.backward(output, gradient)
                    del output
                    clock.mark()
                    if neighbours.input_gradients is not None:
                        assert hidden is not None
                        input_gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
                        outbox.put(neighbours.input_gradients.send(input_gradient, batches[k].length))
            clock.mark()
        outbox.close()
        return total

    def _connect(self, batches: Sequence[StageBatch], has_backwards: bool) -> None:
        """Connect this stage with its neighbours, the earlier boundary first, as every stage does."""
        neighbours = self._neighbours
        lengths = [batch.length for batch in batches]
        directions = [neighbours.inputs, neighbours.input_gradients, neighbours.outputs, neighbours.output_gradients]
        if not has_backwards:
            directions = [neighbours.inputs, neighbours.outputs]
        for boundary in directions:
            if boundary is not None:
                boundary.connect(lengths)


def _sync_context(sync: Synchronizer | None, *, is_last: bool, sends_nothing: bool) -> AbstractContextManager[None]:
    """Return the context in which a backward runs: gradients are accumulated, sent at its end, or sent as they come.

    Args:
        is_last: the backward is that of the last micro-batch, in which gradients are sent.
        sends_nothing: the stage sends no input gradient, after which its gradients would have to be sent.
    """
    if sync is None:
        return nullcontext()
    if not is_last:
        return sync.no_sync()
    return nullcontext() if sends_nothing else sync.held_back()


class _Inbox:
    """Receives the tensors of one boundary for the micro-batches, in their order."""

    def __init__(
        self, boundary: Boundary | None, batches: Sequence[StageBatch], width: int, dtype: torch.dtype
    ) -> None:
        self._boundary, self._batches, self._width, self._dtype = boundary, batches, width, dtype
        self._posted: deque[Receiving] = deque()  # posted and not taken yet
        self._num_posted = 0  # micro-batches whose receives were posted

    @property
    def may_receive_ahead(self) -> bool:
        """Whether receives may be posted early, since a message that has not arrived does not block the device."""
        return self._boundary is not None and not pairs_by_order(self._boundary.connections.group)

    def post_receives(self, count: int) -> None:
        """Post the receives of the first ``count`` micro-batches, unless they were posted before."""
        if self._boundary is None:
            return
        for batch in self._batches[self._num_posted : count]:
            self._posted.append(self._boundary.receive(batch.rows, batch.length, self._width, self._dtype))
            self._num_posted += 1

    def take(self, k: int) -> Tensor | None:
        """Wait for the tensor of micro-batch ``k``, the next in order, and return it; None without a boundary."""
        if self._boundary is None:
            return None
        self.post_receives(k + 1)
        return self._posted.popleft().wait()


class _Outbox:
    """Keeps posted sends, and waits for the oldest ones when there are many.

    Args:
        in_flight: micro-batches of the first stage between their forward and backward. Twice as many sends may be on
            their way while all neighbours keep pace.
    """

    def __init__(self, in_flight: int) -> None:
        self._max_sends = 2 * in_flight
        self._sending: deque[Sending] = deque()

    def put(self, sending: Sending) -> None:
        """Keep a posted send."""
        self._sending.append(sending)
        while len(self._sending) > self._max_sends:
            self._sending.popleft().wait()

    def close(self) -> None:
        """Wait for all sends."""
        while self._sending:
            self._sending.popleft().wait()
