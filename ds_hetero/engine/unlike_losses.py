"""Losses of ranks that take different batches, weighed by what their graphs say.

At every micro-batch each rank reads the terms of its loss (`loss_graph`), the ranks exchange what they are divided by,
and every term's gradient is multiplied by this rank's share of it (`loss_weights`). In the same exchange stand the
buffers that a forward has changed, and whether a loss has operations that none before had: then samples of the latest
batch are probed again (`sample_probe`), and so they are after as many steps as `probe_pace` says, since samples may be
mixed by operations that were there before.

Micro-batches may be accumulated. A unit that is declared, or that the model's own loss shows at the first batch, is
then weighed by the count of the whole step; any other by the count of the micro-batch, which all ranks take of one
micro-batch of one process, and averaged over the micro-batches that the step has, of which a last one of an epoch may
have fewer. What the first batch showed may be chance, as where none of its labels is ignored: a term that is once
divided by something else is weighed by micro-batch from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from ds_hetero.common.announce import announce
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.loss_graph import (
    LINEAR,
    LINEAR_OF_SCALARS,
    LossTerms,
    may_be_of_parameters,
    no_nans,
    on_nodes,
    read_terms,
)
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.loss_weights import (
    RTOL_OF_SUMS,
    RankLoss,
    TermWeight,
    expect_same_buffers,
    explain,
    unit_of_counts,
    weigh_terms,
)
from ds_hetero.runtime.data.row_operations import mixing_node
from ds_hetero.runtime.data.sample_loader import MicroBatchWeights
from ds_hetero.runtime.loss import scaled_loss, shown_loss
from ds_hetero.runtime.loss.scaling import makes_scaled
from ds_hetero.values.section import SECTION


class UnlikeLosses:
    """Weighs the losses of one model."""

    def __init__(self, model: WholeModel) -> None:
        self._model = model
        self._releases: list[Callable[[], None]] = []
        self._has_said = False
        # Terms, by their paths:
        self._of_micro_batches: set[str] = set()  # whose unit is not the one that the first batch showed
        self._weighed_by_step: set[str] = set()  # in this step, where that is another weight than by micro-batch

    def weigh(self, loss: Tensor, batch: MicroBatchWeights, divisor: int) -> Tensor:
        """The same value, with the gradient of this rank's part of the loss of the step, times the ranks.

        Args:
            divisor: micro-batches of a step, by which the engine divides.

        Caller: every rank of the world, once per micro-batch.
        Collectives: one `on_all_ranks`; see `WholeModel.probe_again`.

        Raises:
            ConfigError: what the loss is divided by is not known; see `weigh_terms`; on every rank. The section
                declares what it is a mean over, and a term of it was divided by ``num_items``.
            ModelError: samples see each other, or buffers follow them; on every rank.
        """
        if self._model.is_declared and self._model.times_ranks:
            raise ConfigError(_weighed_twice(str(self._model.loss_convention)))
        terms, of_ranks = self._read(loss, batch)
        if self._is_declared_alone(of_ranks):
            unit = self._model.loss_convention
            assert unit is not None
            own, of_step = getattr(batch.counts, unit), getattr(batch.counts_of_step, unit)
            return shown_loss(loss, dist.get_world_size() * divisor * own / max(of_step, 1))
        if batch.index == 0:
            self._weighed_by_step.clear()
        factors = [
            self._factor_of_step(term.path, weight, of_ranks, batch, divisor)
            for term, weight in zip(terms.terms, self._weights(of_ranks, _items_of_script(of_ranks)), strict=True)
        ]
        self._releases += on_nodes(terms, factors)
        return shown_loss(loss, 1.0)

    def weigh_for_trainer(
        self,
        loss: Tensor,
        batch: MicroBatchWeights,
        items: float | None,
    ) -> Tensor:
        """This rank's part of the loss of a micro-batch, times the ranks, in value and in gradient.

        Args:
            items: what the Trainer gave the model to divide a sum by.

        Caller, Collectives, Raises: as `weigh`.
        """
        terms, of_ranks = self._read(loss, batch)
        if self._is_declared_alone(of_ranks):
            unit = self._model.loss_convention
            assert unit is not None
            own, total = getattr(batch.counts, unit), sum(getattr(one.counts, unit) for one in of_ranks)
            return scaled_loss(loss, dist.get_world_size() * own / max(total, 1))
        weights = self._weights(of_ranks, items)
        factors = [one.factor for one in weights]
        varying = [one.factor for one in weights if one.kind != "common"] or factors
        if len({round(factor, 12) for factor in factors}) == 1:
            no_nans(terms)
            return scaled_loss(loss, factors[0])
        on_nodes(terms, factors)
        if len({round(factor, 12) for factor in varying}) > 1 and not self._has_said:
            self._has_said = True
            if dist.get_rank() == 0:
                announce(
                    f"the loss of {type(self._model.model).__name__} has terms that are divided by unlike numbers: its "
                    "gradients are those of one process; the loss that is logged weighs all by the first one's"
                )
        return shown_loss(loss, 1.0, value=loss.detach() * varying[0])

    def release(self) -> None:
        """Take the factors off the graph of the latest loss."""
        for release in self._releases:
            release()
        self._releases = []

    def _read(self, loss: Tensor, batch: MicroBatchWeights) -> tuple[LossTerms, list[RankLoss]]:
        model, name = self._model, type(self._model.model).__name__
        read: list[LossTerms] = []
        if batch.index == 0:
            model.probe_pace.begin_step()

        def describe() -> RankLoss:
            rows = model.rows
            terms = read_terms(loss, rows, model.times_ranks)
            read.append(terms)
            statistics = model.explain_divisors() if any(one.divisors for one in terms.terms) else {}
            by_term = [
                [entry for divisor in one.divisors for entry in explain(divisor, statistics)] for one in terms.terms
            ]
            mixing = None
            if loss.grad_fn is not None and terms.problem is None:
                mixing = mixing_node(loss.grad_fn, terms.linear, model.output_nodes, rows)
            samples = batch.counts.sample_mean or rows
            return RankLoss(
                [*terms.terms],
                terms.problem,
                rows if rows > 1 else max(samples, 1),
                batch.counts,
                by_term,
                model.changed_buffers(),
                model.note_nodes(loss),
                mixing,
                model.probe_pace.times,
            )

        of_ranks = on_all_ranks(describe)
        expect_same_buffers(of_ranks, name)
        is_due = batch.index == 0 and model.probe_pace.is_due([one.probe_times for one in of_ranks])
        if is_due or any(one.has_new_nodes for one in of_ranks):
            model.probe_again()
        return read[0], of_ranks

    def _is_declared_alone(self, of_ranks: Sequence[RankLoss]) -> bool:
        """Whether the declared unit is all that is known of a loss. Raises `ConfigError`: the loss contradicts it."""
        model = self._model
        unit = model.loss_convention
        if not model.is_declared or unit is None:
            return False
        if any(one.problem is not None or len(one.terms) != len(of_ranks[0].terms) for one in of_ranks):
            return True
        if all(one.is_filler for one in of_ranks):  # copies that fill a short step up contradict nothing
            return True
        terms = [[one.terms[i] for one in of_ranks] for i in range(len(of_ranks[0].terms))]
        means = [one for one in terms if all(term.kind == "mean" for term in one)]
        if any(term.kind == "sum" for one in terms for term in one):
            return True
        if any(_goes_by(unit, [term.count for term in one], of_ranks) for one in means):
            return False
        counts = "; ".join(", ".join(f"{term.count:g}" for term in one) for one in means)
        declared = ", ".join(str(getattr(one.counts, unit)) for one in of_ranks)
        raise ConfigError(
            f'"{SECTION}.loss" is "{unit}", but the loss of {type(model.model).__name__} is a mean over {counts} on '
            f"the ranks, which have {declared}. Leave the key out: "
            "what a loss is a mean over is read from its graph."
        )

    def _weights(self, of_ranks: Sequence[RankLoss], items: float | None = None) -> list[TermWeight]:
        model = self._model
        if model.is_declared:
            of_ranks = [one._replace(mixing=None) for one in of_ranks]
        return weigh_terms(of_ranks, dist.get_rank(), type(model.model).__name__, model.divisors, items)

    def _factor_of_step(
        self, path: str, weight: TermWeight, of_ranks: Sequence[RankLoss], batch: MicroBatchWeights, divisor: int
    ) -> float:
        """The factor of a term where the micro-batches of a step are accumulated.

        Args:
            path: of the term.
        """
        model, split = self._model, self._model.replica.batch_split
        assert split is not None
        # The engine divides by the micro-batches of a full step; 1 where the script has left its division out.
        averaged = min(divisor, batch.micro_batches)
        by_micro_batch = weight.factor * divisor / averaged
        if weight.kind != "mean" or split.micro_steps == 1 or not any(weight.counts):
            return by_micro_batch
        is_of_one = len(set(split.micro_batches)) == 1  # all ranks take parts of one micro-batch of one process
        if model.loss_convention is None and is_of_one:
            return by_micro_batch
        units = UnitCounts._fields if model.loss_convention is None else (model.loss_convention,)
        shares_by_rank = {
            tuple(getattr(one.counts, unit) / max(getattr(batch.counts_of_step, unit), 1) for one in of_ranks)
            for unit in units
            if unit_of_counts(weight.counts, of_ranks, [unit]) is not None
        }
        if len(shares_by_rank) == 1 and path not in self._of_micro_batches:
            (shares,) = shares_by_rank
            if not _are_equal(shares, [count / math.fsum(weight.counts) / averaged for count in weight.counts]):
                self._weighed_by_step.add(path)
            share: float = shares[dist.get_rank()]
            return dist.get_world_size() * divisor * share
        if is_of_one:
            self._of_micro_batches.add(path)
            if path in self._weighed_by_step:
                raise ConfigError(_two_units(type(model.model).__name__, weight.counts, str(model.loss_convention)))
            return by_micro_batch
        counts = ", ".join(f"{one:g}" for one in weight.counts)
        raise ConfigError(
            f"the loss of {type(model.model).__name__} is a mean over {counts} on the ranks, and they accumulate "
            f"{split.micro_batches} micro-batches: what the others of a step are divided by does not show in this one. "
            f'Give all ranks one number of micro-batches, or say it: "{SECTION}": {{"loss": "sample_mean"}}, '
            '"label_mean" or "token_mean".'
        )


def term_of_rank(loss: Tensor, times_ranks: Sequence[Node]) -> str | None:
    """An operation of a part of ``loss``, which `is_scaled`, that no rank has weighed; None where there is none.

    Penalties on parameters are the same on all ranks, and need no weight.

    Args:
        times_ranks: see `WholeModel.times_ranks`.
    """
    assert loss.grad_fn is not None
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if _is_weighed(node, times_ranks) or may_be_of_parameters(node):
            continue
        if node.name() not in LINEAR or _multiplies_samples(node):
            return node.name()
        todo += [below for below, _ in node.next_functions if below is not None]
    return None


def _is_weighed(node: Node, times_ranks: Sequence[Node]) -> bool:
    """Whether a result is a sum of weighed losses times numbers, as where a stack of losses is added up.

    The square of a weighed loss is none: ranks add up their parts, and squares of parts are not the square of the sum.
    """
    todo, seen = [node], set[Node]()
    while todo:
        one = todo.pop()
        if one in seen or makes_scaled(one) or any(one is other for other in times_ranks):
            continue
        below = [following for following, _ in one.next_functions if following is not None]
        if not below or one.name() not in LINEAR_OF_SCALARS or _multiplies_samples(one):
            return False
        seen.add(one)
        todo += below
    return True


def _multiplies_samples(node: Node) -> bool:
    """Whether a product has losses of samples on both sides, or a quotient has one below; numbers have no node."""
    name = node.name()
    if not name.startswith(("Mul", "Div")):
        return False
    of_samples = [side is not None and not may_be_of_parameters(side) for side, _ in node.next_functions]
    return all(of_samples) if name.startswith("Mul") and len(of_samples) > 1 else any(of_samples[1:])


def _items_of_script(of_ranks: Sequence[RankLoss]) -> float | None:
    """The ``num_items`` that `Handle.mean` was given for a term: it divides by them, then multiplies by the ranks."""
    of_means = [term for one in of_ranks for term in one.terms if term.extra != 1 and term.divisors]
    return of_means[0].divisors[-1] if of_means else None


def _weighed_twice(unit: str) -> str:
    return (
        f'"{SECTION}.loss" is "{unit}", by which the whole loss is weighed, and a term of it is of handle.mean with '
        "num_items, which weighs the term already. Leave num_items out of handle.mean, or leave the key out."
    )


def _two_units(name: str, counts: Sequence[float], unit: str) -> str:
    shown = ", ".join(f"{one:g}" for one in counts)
    return (
        f"a term of the loss of {name} is a mean over {shown} on the ranks, and was one by {unit} in an earlier "
        "micro-batch of this optimizer step, whose micro-batches have unlike numbers of samples: by which of the two "
        "it is to be weighed does not show. Let every step have full micro-batches (drop_last=True), or say what the "
        f'loss is a mean over: "{SECTION}": {{"loss": "sample_mean"}}, "label_mean" or "token_mean".'
    )


def _are_equal(shares: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=RTOL_OF_SUMS) for one, other in zip(shares, others, strict=True))


def _goes_by(unit: str, counts: Sequence[float], of_ranks: Sequence[RankLoss]) -> bool:
    counted = [0.0 if one.is_filler else count for count, one in zip(counts, of_ranks, strict=True)]
    return unit_of_counts(counted, of_ranks, [unit]) is not None
