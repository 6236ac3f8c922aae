"""A pipeline without attention, trained for a step by the engine's runner and gradient sync, and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.gradient_sync import AsymmetricGradientSync, pipeline_layouts
from ds_hetero.runtime.pipeline.runner import PipelineRunner, neighbours_of
from ds_hetero.runtime.pipeline.stage_transfers import make_boundary_groups
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage
from ds_hetero.values.plans.activation_transfers import held_intervals

_WIDTH, _WORDS, _LAYERS = 64, 128, 4
_MICRO_BATCHES, _ROWS, _LENGTH = 4, 2, 32


@dataclass(frozen=True)
class SmallBatch:
    """A micro-batch in the form that a stage takes."""

    tokens: Tensor  # [b, L]
    scale: float

    @property
    def rows(self) -> int:
        """B."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """L."""
        return self.tokens.shape[1]


class SmallModel(nn.Module):
    """Embedding, layers, head; the same on every rank. With ``tied`` the head is the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def held(self, layers: tuple[int, int]) -> dict[str, nn.Parameter]:
        """Return the parameters of a stage, by name."""
        parameters = {}
        if layers[0] == 0:
            parameters["embedding.weight"] = self.embedding.weight
        for i in range(*layers):
            parameters |= {f"layers.{i}.{name}": parameter for name, parameter in self.layers[i].named_parameters()}
        if layers[1] == _LAYERS:
            is_tied = self.head.weight is self.embedding.weight
            parameters["embedding.weight" if is_tied else "head.weight"] = self.head.weight
        return parameters

    def run(self, layers: tuple[int, int], batch: SmallBatch, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        """Run a stage on ``tokens`` [b, s] of a micro-batch.

        Return [b, s, H], or a sum of token losses on the last stage.
        """
        x: Tensor = self.embedding(tokens) if hidden is None else hidden
        for i in range(*layers):
            x = x + torch.tanh(self.layers[i](x))
        if layers[1] < _LAYERS:
            return x
        scores, labels = self.head(x).flatten(0, 1), (tokens.flatten() + 1) % _WORDS
        return nn.functional.cross_entropy(scores, labels, reduction="sum") * batch.scale


def plan_of(stages: Sequence[Stage]) -> Plan:
    """Return one pipeline of these stages."""
    pipeline = Pipeline(stages=tuple(stages), micro_batch_size=_ROWS, micro_batches=_MICRO_BATCHES)
    return Plan(pipelines=(pipeline,), model=PlannedModel(num_layers=_LAYERS, num_heads=4, num_kv_heads=4))


def lone_stages(ranks: int) -> list[Stage]:
    """Return a stage for each rank."""
    cuts = [_LAYERS * rank // ranks for rank in range(ranks + 1)]
    return [Stage(ranks=(rank,), layers=(cuts[rank], cuts[rank + 1])) for rank in range(ranks)]


def largest_difference(plan: Plan, device: torch.device, tied: bool) -> dict[str, float]:
    """Train one step of SGD on all ranks, and on this one alone; return differences of loss and of this rank's weights.

    Caller: every rank of the world, each in a stage of ``plan``.
    """
    rank = dist.get_rank()
    expected_loss, expected = _one_process(device, tied)
    model = SmallModel(tied).to(device)
    place = plan.place_of(rank)
    assert place is not None
    stage = plan.pipelines[place[0]].stages[place[1]]
    process_groups = ProcessGroups()
    groups = make_boundary_groups(plan, process_groups)
    parameters = model.held(stage.layers)
    layouts = pipeline_layouts(parameters, plan)
    sync = AsymmetricGradientSync(
        parameters, layouts, replicas=[p.ranks for p in plan.pipelines], groups=process_groups
    )

    def compute(batch: SmallBatch, hidden: Tensor | None) -> Tensor:
        intervals = held_intervals(stage, batch.length, rank)
        tokens = torch.cat([batch.tokens[:, start:stop] for start, stop in intervals], dim=1)
        return model.run(stage.layers, batch, tokens, hidden)

    runner = PipelineRunner(neighbours_of(plan, rank, groups, device), compute, _WIDTH, torch.float32)  # type: ignore[arg-type]
    loss = runner.train(_batches(device), sync)  # type: ignore[arg-type]
    sync.finish()
    total = torch.zeros((), device=device)
    if loss is not None and (stage.inner != "tensor" or rank == stage.ranks[0]):
        total += loss
    dist.all_reduce(total)
    with torch.no_grad():
        for owned in sync.owned.values():
            owned -= owned.grad
    sync.gather()
    differences = [float((parameters[name] - expected[name]).detach().abs().max()) for name in parameters]
    sync.close()
    return {"loss_difference": abs(total.item() - expected_loss), "weight_difference": max(differences)}


def _batches(device: torch.device) -> list[SmallBatch]:
    generator = torch.Generator().manual_seed(0)
    shape = (_MICRO_BATCHES, _ROWS, _LENGTH)
    tokens = torch.randint(0, _WORDS, shape, generator=generator).to(device)
    return [SmallBatch(of_batch, 1 / tokens.numel()) for of_batch in tokens]


def _one_process(device: torch.device, tied: bool) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and weights after a step, by name."""
    model = SmallModel(tied).to(device)
    all_layers = (0, _LAYERS)
    losses = [model.run(all_layers, batch, batch.tokens, None) for batch in _batches(device)]
    loss = torch.stack(losses).sum()
    loss.backward()
    parameters = model.held(all_layers)
    return loss.item(), {name: (p - p.grad).detach() for name, p in parameters.items() if p.grad is not None}
