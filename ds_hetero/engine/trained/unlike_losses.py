"""Weigh the losses of ranks that take different batches, so that gradients are those of one process.

A loss is a sum of terms, most of them means. One process would divide each term by a count over all ranks' samples. So
for every micro-batch

    1  each rank reads the terms of its loss, and their divisors, from the graph (`loss_graph`)
    2  the ranks exchange the divisors
    3  the gradient of each term is multiplied by this rank's share of the divisors and by the number of ranks
           (`loss_weights`)

Example: a mean over 6 labels on rank 0 and over 2 on rank 1. The engine averages over 2 ranks, so the factors are
2 * 6 / 8 = 1.5 and 2 * 2 / 8 = 0.5.

The ranks also tell each other which buffers a forward has changed, and whether the loss has operations that no earlier
loss had. If it has, samples of the latest batch are probed again (`sample_probe`), since such operations may mix
samples. `probe_pace` asks for further probes after some steps.

With accumulation, the unit of a mean decides over what its share is taken. If the unit is declared, or was found from
the model's loss at the first batch, the share is that of the whole step. Otherwise it is the share of the micro-batch,
and the result is averaged over the step's micro-batches (the last step of an epoch may have fewer). A unit found at the
first batch may be a coincidence: labels and tokens have the same count if no label is ignored. So a term whose divisor
differs from its unit once is weighed by micro-batch from then on, also after the job is resumed from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from ds_hetero.common.announce import announce
from ds_hetero.common.reading import JsonObject
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.graph_nodes import LINEAR, LINEAR_OF_SCALARS
from ds_hetero.runtime.data.loss_graph import LossTerms, multiply_gradients, read_terms, zero_nan_gradients
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.loss_weights import (
    RTOL_SUMS,
    RankLoss,
    TermWeight,
    expect_same_buffers,
    explain_divisor,
    unit_of_counts,
    weigh_terms,
)
from ds_hetero.runtime.data.parameter_terms import may_be_of_parameters
from ds_hetero.runtime.data.row_operations import mixing_node
from ds_hetero.runtime.data.sample_loader import MicroBatchCounts
from ds_hetero.runtime.loss import scaled_loss, shown_loss
from ds_hetero.runtime.loss.scaling import makes_scaled
from ds_hetero.values.section import SECTION


class UnlikeLosses:
    """Weighs the losses that ranks compute from their different batches, for one model."""

    def __init__(self, batches: UnlikeBatches) -> None:
        self._batches, self._unit = batches, batches.unit
        self._name = type(batches.model).__name__
        self._releases: list[Callable[[], None]] = []  # each removes a factor from the graph of the latest loss
        self._has_announced_factors = False  # whether `weigh_for_trainer` has announced unlike factors
        # Paths of terms whose divisors are not counts of the unit that the first batch showed.
        self._other_unit_paths: set[str] = set()
        # Paths of terms that were weighed by the step in this step, if by micro-batch the weight would be another one.
        self._paths_by_step: set[str] = set()

    def weigh(self, loss: Tensor, batch: MicroBatchCounts, divisor: int) -> Tensor:
        """Return a loss of the same value, whose gradient is this rank's part of the step's times the number of ranks.

        Args:
            loss: a scalar.
            batch: counts of the micro-batch that it was computed from.
            divisor: micro-batches of a step, by which the engine divides.

        Caller: every rank of the world, once per micro-batch.
        Collectives: one `on_all_ranks`; those of `SampleProbes.probe_again`, if a probe is due.

        Raises:
            ConfigError: on every rank: a divisor of the loss is not known, see `weigh_terms`; or the section declares
                what the loss is a mean over, but a term was divided by ``num_items``.
            ModelError: on every rank: samples see each other, or buffers depend on them.
        """
        if self._unit.is_declared and self._batches.times_ranks:
            raise ConfigError(_weighed_twice_text(str(self._unit.name)))
        terms, of_ranks = self._read(loss, batch)
        if self._is_declared_alone(of_ranks):
            unit = self._unit.name
            assert unit is not None
            count, count_of_step = getattr(batch.counts, unit), getattr(batch.counts_of_step, unit)
            return shown_loss(loss, dist.get_world_size() * divisor * count / max(count_of_step, 1))
        if batch.index == 0:
            self._paths_by_step.clear()
        weights = self._weights(of_ranks, _items_of_script(of_ranks))
        factors = []
        for term, weight in zip(terms.terms, weights, strict=True):
            factors.append(self._factor_of_step(term.path, weight, of_ranks, batch, divisor))
        self._releases += multiply_gradients(terms, factors)
        return shown_loss(loss, 1.0)

    def weigh_for_trainer(
        self,
        loss: Tensor,
        batch: MicroBatchCounts,
        items: float | None,
    ) -> Tensor:
        """Return the number of ranks times this rank's part of a micro-batch's loss, as value and as gradient.

        Args:
            loss: a scalar.
            batch: counts of the micro-batch that it was computed from.
            items: the number by which the Trainer let the model divide a sum, if any.

        Caller, Collectives, Raises: as `weigh`.
        """
        terms, of_ranks = self._read(loss, batch)
        if self._is_declared_alone(of_ranks):
            unit = self._unit.name
            assert unit is not None
            count, total = getattr(batch.counts, unit), sum(getattr(rank_loss.counts, unit) for rank_loss in of_ranks)
            return scaled_loss(loss, dist.get_world_size() * count / max(total, 1))
        weights = self._weights(of_ranks, items)
        factors = [weight.factor for weight in weights]
        sample_factors = [weight.factor for weight in weights if weight.kind != "common"] or factors
        if len({round(factor, 12) for factor in factors}) == 1:
            zero_nan_gradients(terms)
            return scaled_loss(loss, factors[0])
        multiply_gradients(terms, factors)
        if len({round(factor, 12) for factor in sample_factors}) > 1 and not self._has_announced_factors:
            self._has_announced_factors = True
            if dist.get_rank() == 0:
                announce(
                    f"the loss of {self._name} has terms that are divided by unlike numbers: its "
                    "gradients are those of one process, but the logged loss weighs all terms like the first one"
                )
        return shown_loss(loss, 1.0, value=loss.detach() * sample_factors[0])

    def state_dict(self) -> JsonObject:
        """Return what batches have shown of the loss so far, for a checkpoint; the same on every rank."""
        unit = self._unit
        return {
            "unit_is_found": unit.is_examined,
            "unit": unit.name if unit.is_examined else None,
            "of_micro_batches": sorted(self._other_unit_paths),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore what batches had shown when a checkpoint was saved, so that the next batch is not examined again."""
        self._other_unit_paths = set(state["of_micro_batches"])
        if state["unit_is_found"] and not self._unit.is_declared:
            self._unit.take(state["unit"])

    def release(self) -> None:
        """Remove from the graph of the latest loss the hooks that multiply its gradients."""
        for release in self._releases:
            release()
        self._releases = []

    def _read(self, loss: Tensor, batch: MicroBatchCounts) -> tuple[LossTerms, list[RankLoss]]:
        """Return the terms of this rank's loss, and a description of every rank's; probe samples if that is due.

        Raises:
            ModelError: on every rank: samples see each other, or buffers depend on them.
        """
        forwards, probes = self._batches.forwards, self._batches.probes
        local_terms: list[LossTerms] = []
        if batch.index == 0:
            probes.pace.begin_step()

        def describe() -> RankLoss:
            rows = forwards.arguments.rows
            terms = read_terms(loss, rows, self._batches.times_ranks)
            local_terms.append(terms)
            statistics = forwards.arguments.totals() if any(term.divisors for term in terms.terms) else {}
            explained = []
            for term in terms.terms:
                entries: list[str] = []
                for term_divisor in term.divisors:
                    entries += explain_divisor(term_divisor, statistics)
                explained.append(entries)
            mixing = None
            if loss.grad_fn is not None and terms.problem is None:
                mixing = mixing_node(loss.grad_fn, terms.linear, forwards.output_nodes, rows)
            samples = batch.counts.sample_mean or rows
            return RankLoss(
                [*terms.terms],
                terms.problem,
                rows if rows > 1 else max(samples, 1),
                batch.counts,
                explained,
                forwards.changed_buffers(),
                forwards.operations.note(loss),
                mixing,
                probes.pace.times,
            )

        of_ranks = on_all_ranks(describe)
        expect_same_buffers(of_ranks, self._name)
        is_due = batch.index == 0 and probes.pace.is_due([rank_loss.probe_times for rank_loss in of_ranks])
        if is_due or any(rank_loss.has_new_nodes for rank_loss in of_ranks):
            probes.probe_again(forwards.arguments)
        return local_terms[0], of_ranks

    def _is_declared_alone(self, of_ranks: Sequence[RankLoss]) -> bool:
        """Return whether the whole loss is to be weighed by the declared unit, since its terms cannot be read.

        Raises:
            ConfigError: the terms can be read, and none is a mean over the declared unit.
        """
        unit = self._unit.name
        if not self._unit.is_declared or unit is None:
            return False
        num_terms = len(of_ranks[0].terms)
        if any(rank_loss.problem is not None or len(rank_loss.terms) != num_terms for rank_loss in of_ranks):
            return True
        if all(rank_loss.is_filler for rank_loss in of_ranks):  # copies that fill up a step contradict no unit
            return True
        terms_by_rank = [[rank_loss.terms[i] for rank_loss in of_ranks] for i in range(num_terms)]
        if any(term.kind == "sum" for term_of_ranks in terms_by_rank for term in term_of_ranks):
            return True
        counts_of_means = []  # for each term that is a mean, its divisors by rank
        for term_of_ranks in terms_by_rank:
            if all(term.kind == "mean" for term in term_of_ranks):
                counts_of_means.append([term.count for term in term_of_ranks])
        if any(_is_mean_over(unit, counts, of_ranks) for counts in counts_of_means):
            return False
        counts_text = "; ".join(", ".join(f"{count:g}" for count in counts) for counts in counts_of_means)
        declared_text = ", ".join(str(getattr(rank_loss.counts, unit)) for rank_loss in of_ranks)
        raise ConfigError(
            f'"{SECTION}.loss" is "{unit}", but the loss of {self._name} is a mean over {counts_text} '
            f"on the ranks, which have {declared_text}. Leave the key out: "
            "what a loss is a mean over is read from its graph."
        )

    def _weights(self, of_ranks: Sequence[RankLoss], items: float | None = None) -> list[TermWeight]:
        """Return this rank's weight of every term, see `weigh_terms`; a declared unit lets losses mix samples."""
        if self._unit.is_declared:
            of_ranks = [rank_loss._replace(mixing_operation=None) for rank_loss in of_ranks]
        return weigh_terms(of_ranks, dist.get_rank(), self._name, self._batches.probes.divisors, items)

    def _factor_of_step(
        self, path: str, weight: TermWeight, of_ranks: Sequence[RankLoss], batch: MicroBatchCounts, divisor: int
    ) -> float:
        """Return this rank's factor of a term if the micro-batches of a step are accumulated.

        Args:
            path: where the term is in the graph of the loss, which identifies it.
            weight: of the term, in this micro-batch.
            of_ranks: descriptions of the ranks' losses.
            batch: counts of this rank's micro-batch.
            divisor: micro-batches of a step, by which the engine divides.

        Raises:
            ConfigError: on every rank: it is not known whether to weigh the term by the step or by the micro-batch.
        """
        split, unit_of_loss = self._batches.split, self._unit.name
        # The engine divides by the micro-batches of a full step; 1 if the script has switched its division off.
        num_averaged = min(divisor, batch.micro_batches)
        factor_by_micro_batch = weight.factor * divisor / num_averaged
        if weight.kind != "mean" or split.micro_steps == 1 or not any(weight.counts):
            return factor_by_micro_batch
        # Whether the n-th micro-batches of all ranks together are the n-th micro-batch of one process.
        have_common_micro_batches = len(set(split.micro_batches)) == 1
        if unit_of_loss is None and have_common_micro_batches:
            return factor_by_micro_batch
        # Shares of the step by rank, for each unit that the term may be a mean over. They must not depend on the unit.
        units = UnitCounts._fields if unit_of_loss is None else (unit_of_loss,)
        candidates: set[tuple[float, ...]] = set()
        for unit in units:
            if unit_of_counts(weight.counts, of_ranks, [unit]) is not None:
                count_of_step = max(getattr(batch.counts_of_step, unit), 1)
                candidates.add(tuple(getattr(rank_loss.counts, unit) / count_of_step for rank_loss in of_ranks))
        if len(candidates) == 1 and path not in self._other_unit_paths:
            (shares,) = candidates
            total = math.fsum(weight.counts)
            if not _are_close(shares, [count / total / num_averaged for count in weight.counts]):
                self._paths_by_step.add(path)
            share: float = shares[dist.get_rank()]
            return dist.get_world_size() * divisor * share
        if have_common_micro_batches:
            self._other_unit_paths.add(path)
            if path in self._paths_by_step:
                raise ConfigError(_two_units_text(self._name, weight.counts, str(unit_of_loss)))
            return factor_by_micro_batch
        counts = ", ".join(f"{count:g}" for count in weight.counts)
        raise ConfigError(
            f"the loss of {self._name} is a mean over {counts} on the ranks, and they accumulate "
            f"{split.micro_batches} micro-batches: this micro-batch does not show the divisors of the step's others. "
            f'Give all ranks the same number of micro-batches, or declare the unit: "{SECTION}": '
            '{"loss": "sample_mean"}, "label_mean" or "token_mean".'
        )


def find_unweighed_term(loss: Tensor, times_ranks: Sequence[Node]) -> str | None:
    """Find a term of a scaled loss that is computed from this rank's samples and was not weighed.

    Penalties on parameters are the same on all ranks, and need no weight.

    Args:
        loss: a loss for which `is_scaled` is True.
        times_ranks: see `UnlikeBatches.times_ranks`.

    Returns:
        The name of an operation of the term; None if there is no such term.
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
    """Return whether a node's result is a sum of weighed losses times numbers, as when a stack of losses is added up.

    The square of a weighed loss is not: ranks add up their parts, and the sum of squares is not the square of the sum.
    """
    todo, seen = [node], set[Node]()
    while todo:
        current = todo.pop()
        if current in seen or makes_scaled(current) or any(current is other for other in times_ranks):
            continue
        below = [following for following, _ in current.next_functions if following is not None]
        if not below or current.name() not in LINEAR_OF_SCALARS or _multiplies_samples(current):
            return False
        seen.add(current)
        todo += below
    return True


def _multiplies_samples(node: Node) -> bool:
    """Return whether an autograd node multiplies two losses of samples, or divides by such a loss.

    A factor or divisor that is a plain number has no node, and does not count.
    """
    name = node.name()
    if not name.startswith(("Mul", "Div")):
        return False
    has_samples = [side is not None and not may_be_of_parameters(side) for side, _ in node.next_functions]
    return all(has_samples) if name.startswith("Mul") and len(has_samples) > 1 else any(has_samples[1:])


def _items_of_script(of_ranks: Sequence[RankLoss]) -> float | None:
    """Return the ``num_items`` that the script gave `Handle.mean` for a term, if any.

    Such a term is divided by ``num_items`` last, and then multiplied by the number of ranks: its ``rank_factor`` is not
    1.
    """
    for rank_loss in of_ranks:
        for term in rank_loss.terms:
            if term.rank_factor != 1 and term.divisors:
                return term.divisors[-1]
    return None


def _weighed_twice_text(unit: str) -> str:
    """Return the message for a loss with a declared unit that has a term of `Handle.mean`."""
    return (
        f'"{SECTION}.loss" is "{unit}", by which the whole loss is weighed, but a term of it comes from handle.mean '
        "with num_items, which weighs the term already. Leave num_items out of handle.mean, or leave the key out."
    )


def _two_units_text(name: str, counts: Sequence[float], unit: str) -> str:
    """Return the message for a term whose divisors have changed their unit within an optimizer step."""
    counts_text = ", ".join(f"{count:g}" for count in counts)
    return (
        f"a term of the loss of {name} is a mean over {counts_text} on the ranks, but in an earlier micro-batch of "
        f"this optimizer step it was a mean by {unit}. The step's micro-batches have unlike numbers of samples, so it "
        "is not known by which of the two to weigh the term. Let every step have full micro-batches (drop_last=True), "
        f'or say what the loss is a mean over: "{SECTION}": {{"loss": "sample_mean"}}, "label_mean" or "token_mean".'
    )


def _are_close(shares: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether shares are equal up to the rounding of sums."""
    return all(math.isclose(share, other, rel_tol=RTOL_SUMS) for share, other in zip(shares, others, strict=True))


def _is_mean_over(unit: str, counts: Sequence[float], of_ranks: Sequence[RankLoss]) -> bool:
    """Return whether divisors, by rank, are the counts of a unit; micro-batches that only fill up a step count 0."""
    sample_counts = []
    for count, rank_loss in zip(counts, of_ranks, strict=True):
        sample_counts.append(0.0 if rank_loss.is_filler else count)
    return unit_of_counts(sample_counts, of_ranks, [unit]) is not None
