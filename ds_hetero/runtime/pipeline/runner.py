"""1F1B on one rank: the passes of its stage in order, with the hops to its neighbours under them.

A step runs every micro-batch of the rank's pipeline forward and backward. Sends are waited for when their stage runs so
many passes ahead that they must have arrived. What is kept of a micro-batch between its two passes is the stage's input
and its output. Before its first message a step connects the ranks that it will send between.

On NCCL a posted message occupies the device until its other end is posted, and until then whatever needs an idle device
stands still, such as memory that is given back to the driver, or the loading of a module. Any stages may need it at the
same time, so of all that a stage has posted when it begins a pass, nothing may need that pass, or one of a stage that
stands still in turn:

    activations  are asked for by the pass that takes them. One that is asked for earlier keeps this stage from sending
                 a gradient, and the stage before, which asks for that gradient, from making what was asked for.
    gradients    are asked for when the stage after has all outputs that it needs before it sends them, and at once:
                 it may need an idle device behind its send.
    buckets      of the gradient synchronizer leave behind the last input gradient: their other members may wait for it.

Transfers run under the pass before all the same, for the host posts them while its device still computes that.
Where messages are the host's matter, as on gloo, activations are asked for one pass ahead.

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
from ds_hetero.runtime.pipeline.hops import Boundary, BoundaryGroups, Receiving, Sending
from ds_hetero.runtime.step_clock import UNTIMED, Clock
from ds_hetero.values.plans import Pipeline, Plan
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD, Action, gradients_due, one_f_one_b

StageCompute = Callable[[StageBatch, Tensor | None], Tensor]
"""The layers of a stage: the forward of a micro-batch, of which the stage takes this rank's tokens.

Given [b, s, H] from the stage before, None on the first; returns [b, s, H], on the last stage a scalar, this rank's
summand of the loss.
"""


class Synchronizer(Protocol):
    """Object that synchronizes gradients; see `ds_hetero.gradient_sync.sync`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients add up."""

    def held_back(self) -> AbstractContextManager[None]:
        """Let gradients leave at the end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """Both directions of the boundaries of this rank's stage."""

    pipeline: Pipeline
    stage: int  # index of its stage
    inputs: Boundary | None = None  # activations from the stage before; None on the first
    input_gradients: Boundary | None = None  # gradients to the stage before
    outputs: Boundary | None = None  # activations to the stage after; None on the last
    output_gradients: Boundary | None = None  # gradients from the stage after


def neighbours_of(
    plan: Plan, rank: int, groups: dict[tuple[int, int], BoundaryGroups], device: torch.device
) -> Neighbours:
    """Return the boundaries of the stage of ``rank``, over ``groups`` of `make_boundary_groups`."""
    place = plan.place_of(rank)
    assert place is not None
    i, j = place
    pipeline = plan.pipelines[i]
    own = pipeline.stages[j]
    inputs = input_gradients = outputs = output_gradients = None
    if j > 0:
        before, pair = pipeline.stages[j - 1], groups[i, j - 1]
        inputs = Boundary(before, own, rank, pair.activations, pair.later, device)
        input_gradients = Boundary(own, before, rank, pair.gradients, pair.earlier, device)
    if j + 1 < len(pipeline.stages):
        after, pair = pipeline.stages[j + 1], groups[i, j]
        outputs = Boundary(own, after, rank, pair.activations, pair.later, device)
        output_gradients = Boundary(after, own, rank, pair.gradients, pair.earlier, device)
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
        clock: told of the passes of training, not of those of evaluation.
    """

    def __init__(
        self, neighbours: Neighbours, compute: StageCompute, width: int, dtype: torch.dtype, clock: Clock = UNTIMED
    ) -> None:
        self._neighbours, self._compute = neighbours, compute
        self._width, self._dtype, self._clock = width, dtype, clock

    def train(self, batches: Sequence[StageBatch], sync: Synchronizer | None = None) -> Tensor | None:
        """Run all passes; return the sum of losses on the last stage, else None. Raises `PeerError`: one failed.

        Args:
            sync: of the gradients, which leave in the last backward, or behind it; None where they stay.

        Caller: every rank of the pipeline, with the same micro-batches.
        """
        in_flight = self._neighbours.pipeline.in_flight(self._neighbours.stage)
        return self._run(batches, one_f_one_b(in_flight, len(batches)), sync)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[StageBatch]) -> Tensor | None:
        """Run the forwards alone; the arguments and the result are those of `train`."""
        return self._run(batches, [Action(FORWARD, k) for k in range(len(batches))], None)

    def _run(
        self,
        batches: Sequence[StageBatch],
        actions: Sequence[Action],
        sync: Synchronizer | None,
    ) -> Tensor | None:
        near = self._neighbours
        has_backwards = any(action.kind == BACKWARD for action in actions)  # else no gradient comes that is asked for
        self._connect(batches, has_backwards)
        inputs = _Inbox(near.inputs, batches, self._width, self._dtype)
        gradients = _Inbox(near.output_gradients if has_backwards else None, batches, self._width, self._dtype)
        in_flight_after = 1 if near.outputs is None else near.pipeline.in_flight(near.stage + 1)
        outbox = _Outbox(near.pipeline.in_flight(0))
        kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        total: Tensor | None = None
        clock = self._clock if has_backwards else UNTIMED
        for kind, k in actions:
            clock.start_pass(kind, k)
            if kind == FORWARD:
                hidden = inputs.take(k)
                if inputs.may_ask_ahead:
                    inputs.expect(k + 2)
                clock.mark()
                if hidden is not None and torch.is_grad_enabled():
                    hidden.requires_grad_()
                output = self._compute(batches[k], hidden)
                clock.mark()
                kept[k] = hidden, output
                if near.outputs is None:
                    total = output.detach().clone() if total is None else total + output.detach()
                else:
                    outbox.put(near.outputs.send(output.detach(), batches[k].length))
                    gradients.expect(gradients_due(in_flight_after, k + 1, len(batches)))
                if not torch.is_grad_enabled():
                    kept.clear()
            else:
                hidden, output = kept.pop(k)
                gradient = gradients.take(k)
                clock.mark()
                with _buckets(sync, is_last=k == len(batches) - 1, has_sent=near.input_gradients is None):
                    if output.requires_grad:  # not if nothing before it is trained
                        torch.autograd.backward(output, gradient)
                    del output
                    clock.mark()
                    if near.input_gradients is not None:
                        assert hidden is not None
                        back = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
                        outbox.put(near.input_gradients.send(back, batches[k].length))
            clock.mark()
        outbox.close()
        return total

    def _connect(self, batches: Sequence[StageBatch], has_backwards: bool) -> None:
        """Connect this stage with its neighbours, from the first boundary to the last, as every stage does."""
        near = self._neighbours
        lengths = [batch.length for batch in batches]
        directions = [near.inputs, near.input_gradients, near.outputs, near.output_gradients]
        if not has_backwards:
            directions = [near.inputs, near.outputs]
        for boundary in directions:
            if boundary is not None:
                boundary.connect(lengths)


def _buckets(sync: Synchronizer | None, *, is_last: bool, has_sent: bool) -> AbstractContextManager[None]:
    """Return the context in which gradients add up, leave behind the input gradient, or leave at once."""
    if sync is None:
        return nullcontext()
    if not is_last:
        return sync.no_sync()
    return nullcontext() if has_sent else sync.held_back()


class _Inbox:
    """Inbox of one boundary: what belongs to micro-batches, in their order."""

    def __init__(
        self, boundary: Boundary | None, batches: Sequence[StageBatch], width: int, dtype: torch.dtype
    ) -> None:
        self._boundary, self._batches, self._width, self._dtype = boundary, batches, width, dtype
        self._asked: deque[Receiving] = deque()
        self._num_asked = 0

    @property
    def may_ask_ahead(self) -> bool:
        """Whether messages may be requested early: one that has not arrived keeps no rank from computing."""
        return self._boundary is not None and not pairs_by_order(self._boundary.connections.group)

    def expect(self, count: int) -> None:
        """Request the messages of the first ``count`` micro-batches, unless they were requested before."""
        if self._boundary is None:
            return
        for batch in self._batches[self._num_asked : count]:
            self._asked.append(self._boundary.receive(batch.rows, batch.length, self._width, self._dtype))
            self._num_asked += 1

    def take(self, k: int) -> Tensor | None:
        """Return what belongs to micro-batch ``k``, the next in order; None without a boundary."""
        if self._boundary is None:
            return None
        self.expect(k + 1)
        return self._asked.popleft().wait()


class _Outbox:
    """Messages on their way, as many as can be without a neighbour being late."""

    def __init__(self, most: int) -> None:
        self._most = 2 * most
        self._sending: deque[Sending] = deque()

    def put(self, sending: Sending) -> None:
        self._sending.append(sending)
        while len(self._sending) > self._most:
            self._sending.popleft().wait()

    def close(self) -> None:
        while self._sending:
            self._sending.popleft().wait()
