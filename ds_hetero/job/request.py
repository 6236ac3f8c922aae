"""Request of the "heterogeneity" section: parsed once, its plan file read once, and alike on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds_hetero.decision.batches import plan_of_batches
from ds_hetero.decision.decide_pipelines import check_pipeline_section, inners_of
from ds_hetero.decision.facts import TrainingFacts
from ds_hetero.decision.resolve import given_plan, is_of_pipelines
from ds_hetero.job.start import World, expect_same_sections
from ds_hetero.runtime.devices import device_memory_bytes
from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.section import HeterogeneitySection


@dataclass(frozen=True)
class ReplicaBatches:
    """The batches of one replica among replicas that take different ones."""

    split: BatchSplit  # the batches of all replicas
    replica_id: int  # index of this rank's replica


@dataclass(frozen=True)
class Request:
    """Request to a job.

    Args:
        plan: in the section's file, or inline in it, or of its batches; None where it names a strategy or asks for a
            search.
    """

    section: HeterogeneitySection | None  # the "heterogeneity" section; None where there is none, or it is switched off
    plan: Plan | None

    @property
    def is_of_pipelines(self) -> bool:
        """Whether the model is cut into stages of pipelines, by the plan or by one that is searched for."""
        return self.section is not None and is_of_pipelines(self.plan, self.section)

    def batches_of(self, rank: int) -> ReplicaBatches | None:
        """Return the batches of a rank where the replicas of the plan take different ones.

        They are needed before there is a model.
        """
        if self.plan is None or self.plan.batch_split is None or self.is_of_pipelines:
            return None
        place = self.plan.place_of(rank)
        assert place is not None
        return ReplicaBatches(self.plan.batch_split, place[0])


@waiting_for_peers("reading what the section asks for")
def agree_on_request(
    world: World, read: Callable[[], HeterogeneitySection | None], training: TrainingFacts | None = None
) -> Request:
    """Read the section on every rank and compare it; rank 0 reads the plan that it names.

    Args:
        world: the ranks of the job.
        read: returns the section; what it raises on any rank is raised on all.
        training: of the configuration, which says the global batch.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`, or two.

    Raises:
        HeteroError: on every rank, when sections are wrong or differ, the plan does not fit the world, or its stages do
            not follow a key of the section.
    """

    def read_own() -> Request:
        section = read()
        if section is None or world.rank > 0:
            return Request(section, None)
        if takes_batches(section):
            return Request(section, None)
        plan = given_plan(section, world.size)
        if plan is not None and is_of_pipelines(plan, section):
            check_pipeline_section(section, inners_of(plan))
        return Request(section, plan)

    by_rank = world.on_all_ranks(read_own)
    expect_same_sections([request.section for request in by_rank])
    section = by_rank[0].section
    if section is None or section.batch is None or not takes_batches(section):
        return by_rank[0]
    memory = world.on_all_ranks(device_memory_bytes) if section.batch == "by_speed" else []
    known = memory if all(memory) else []
    return Request(section, plan_of_batches(section.batch, training or TrainingFacts(), world.size, known))


def takes_batches(section: HeterogeneitySection) -> bool:
    """Whether a section says batches of ranks that run the whole model."""
    return section.batch is not None and section.parallel == "sequence"
