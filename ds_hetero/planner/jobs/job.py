"""Results of the search over jobs: jobs of several kinds, best first, and kinds that are refused."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.jobs.kinds import KINDS, Freedom
from ds_hetero.planner.results.planned import Planned


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTask:
    """Task of a search over jobs: cluster, model, batch, and the settings that the search may choose."""

    cluster: Cluster  # all devices; a job may leave some out
    model: ModelSpec
    workload: Workload  # settings that the user fixed, and the usual ones where the search may choose
    batch: int  # sequences of a step
    freedom: Freedom
    stage_kinds: tuple[str, ...] | None = None  # of stages of several ranks that the model can have; None for all


@dataclass(frozen=True, kw_only=True)
class Job:
    """A result of the search over jobs: one kind of job (see `KINDS`), its settings and its prediction."""

    kind: str  # of `KINDS`
    cluster: Cluster  # devices that take part, numbered from 0
    whole_cluster: Cluster  # all devices that were given
    left_out: tuple[int, ...]  # ranks of the whole cluster that do not take part
    workload: Workload  # with the chosen settings
    planned: Planned
    limit: str  # what limits its speed, in a few words

    @property
    def step_s(self) -> float:
        """Predicted time of an optimizer step."""
        return self.planned.step_s

    @property
    def settings(self) -> tuple[str, ...]:
        """The chosen settings in words: ``ZeRO 1``, ``no recomputation``, ``tiled loss``."""
        work = self.workload
        inside = " with shards inside nodes" if work.zero_within else ""
        words = [f"ZeRO {work.zero_stage}{inside}"]
        if not work.activation_checkpointing and not work.selective_checkpointing:
            words.append("no recomputation")
        words += (word for word in work.memory_savers if "LoRA" not in word)
        return tuple(words)

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        work = self.workload
        return {
            "kind": self.kind,
            "name": KINDS[self.kind],
            "left_out": list(self.left_out),
            "settings": {
                "zero_stage": work.zero_stage,
                "zero_within_nodes": work.zero_within,
                "activation_checkpointing": work.activation_checkpointing,
                "selective_checkpointing": work.selective_checkpointing,
                "keep_attention": work.keeps_attention,
                "ring_gradients": work.ring_gradients,
                "tiled_loss": work.tiled_logits,
                "tiled_mlp": work.tiled_mlp,
                "offload_activations": work.offload_activations,
                "offload_optimizer": work.offload_optimizer,
                "experts": list(work.experts) if isinstance(work.experts, tuple) else work.experts,
                "micro_batch": work.micro_batch,
                "micro_batches": work.micro_batches,
            },
            "step_s": self.step_s,
            "tokens_per_s": self.planned.tokens_per_s,
            "limit": self.limit,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A kind of job that cannot run, and why."""

    kind: str  # of `KINDS`
    reason: str

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"kind": self.kind, "name": KINDS[self.kind], "step_s": None, "reason": self.reason}


def does_not_fit_text(reason: str | None) -> str:
    """Return why a job is refused, from the reason of a prediction, without its breakdown of memory in brackets."""
    return f"does not fit: {str(reason).partition(' (weights')[0]}"


@dataclass(frozen=True, kw_only=True)
class FoundJobs:
    """The best job of every kind, and the kinds that are refused."""

    jobs: tuple[Job, ...]  # best first, one of each kind that fits; never empty
    refused: tuple[Refused, ...]
    search_s: float  # time of the search

    @property
    def best(self) -> Job:
        """The fastest job; of equally fast ones that of the simplest kind."""
        return self.jobs[0]
