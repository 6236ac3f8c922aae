"""Probe whether the samples of a batch influence each other's losses, in which case no weights of losses are exact.

`ds_hetero.runtime.data.sample_probe` is the probe itself. Here is when it runs: on the first batch of training, and
again when `unlike_losses` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.common.announce import announce
from ds_hetero.engine.outside_runs import gathering_in_forward, in_evaluation
from ds_hetero.engine.trained.forward_arguments import ForwardArguments, rows_of_batch, run_batch
from ds_hetero.engine.trained.recorded_forwards import RecordedForwards
from ds_hetero.engine.trained.whole_model_checks import expect_no_router_loss
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.loss_units import Batch, expect_documents_apart
from ds_hetero.runtime.data.loss_weights import DivisorKind
from ds_hetero.runtime.data.probe_pace import ProbePace
from ds_hetero.runtime.data.sample_probe import probe_samples, raise_if_mixed


class SampleProbes:
    """Probes of one model.

    Attributes:
        pace: decides when samples are probed again.
        divisors: kinds of divisors in the loss, see `ds_hetero.runtime.data.loss_weights`.
        has_run: True if a first batch was probed.
        after_run: clears what the engine has recorded of a probe's forward and backward; set by the engine.
    """

    def __init__(self, model: nn.Module, forwards: RecordedForwards) -> None:
        self._model, self._forwards = model, forwards
        self.pace = ProbePace("by_cost")
        self.divisors: dict[str, DivisorKind] = {}
        self.has_run = False
        self.after_run: Callable[[], None] = lambda: None
        self._has_announced_open = False  # whether it was announced that a probe could not decide

    def expect_samples_apart(
        self, compute: Callable[[Batch], Tensor | None], batch: Batch, run: Callable[[Batch], object] | None = None
    ) -> None:
        """Check, once before training, that the loss of a sample does not depend on others in its micro-batch.

        Args:
            compute: returns the loss of a batch; None if there is none.
            batch: a batch of this rank.
            run: returns the outputs of a batch, with the loss; None: ``compute`` is used.

        Caller: every rank of the world.
        Collectives: those of `expect_documents_apart`, one `on_all_ranks`, and those of six forwards.

        Raises:
            ConfigError: on every rank: the model adds an auxiliary loss of its routers.
            ModelError: on every rank: the loss of a sample, or of a document of a packed row, depends on others.
        """
        expect_no_router_loss(self._model, batch)
        with gathering_in_forward(self._model), in_evaluation(self._model):
            expect_documents_apart(compute, batch, type(self._model).__name__)
        self.has_run = True
        self._probe(run or compute, batch, rows_of_batch(batch))

    def probe_again(self, arguments: ForwardArguments) -> None:
        """Probe with the arguments of a forward. Raises `ModelError` on every rank: see `_probe`.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`, and those of a probe's forwards and backwards.
        """
        self._probe(lambda batch: run_batch(self._model, batch), arguments.as_batch(), arguments.rows)

    def _probe(self, run: Callable[[Batch], object], batch: Batch, rows: int) -> None:
        """Probe whether the loss of a sample depends on other samples of its batch, and learn the kinds of divisors.

        Args:
            run: returns the outputs of a batch.
            batch: a batch of this rank.
            rows: number of samples of the batch.

        Raises:
            ModelError: on every rank: the loss of a sample depends on others; see `probe_samples`.
        """
        with self._forwards.paused(), self.pace.timing(), gathering_in_forward(self._model):
            results_of_ranks = on_all_ranks(lambda: probe_samples(run, batch, rows, self._model, self.after_run))
        name = type(self._model).__name__
        self.divisors |= raise_if_mixed(results_of_ranks, name)
        is_open = any(result.is_open for result in results_of_ranks)
        if is_open and not self._has_announced_open and dist.get_rank() == 0:
            announce(
                f"{name}: the probe could not decide whether the loss of a sample depends on other samples of its "
                "batch, because ds_hetero does not know the number that the loss is divided by. It checks the outputs, "
                "the buffers and the operations of the loss instead; nothing is to be done unless a check fails"
            )
        self._has_announced_open = True
