"""1F1B over stages that cut a micro-batch differently, against one process, with a model that treats tokens alone."""

import itertools
import json
import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.proof.chance import random_plan, random_schedule
from benchmarks.proof.events import Call
from benchmarks.proof.order import violations
from benchmarks.proof.recording import recording
from ds_hetero.errors import BatchError, SyncError
from ds_hetero.gradient_sync import AsymmetricGradientSync, pipeline_layouts
from ds_hetero.runtime.pipeline.batches import SameBatches
from ds_hetero.runtime.pipeline.runner import PipelineRunner, neighbours_of
from ds_hetero.runtime.pipeline.stage_transfers import make_boundary_groups
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage
from ds_hetero.values.plans.activation_transfers import held_intervals
from tests.support import run_ranks

WIDTH, WORDS, LAYERS = 6, 11, 5


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    scale: float

    @property
    def rows(self):
        return self.tokens.shape[0]

    @property
    def length(self):
        return self.tokens.shape[1]


class Model(nn.Module):
    """Embedding, layers, head; the same on every rank. With ``tied`` the head is the embedding."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def held(self, layers):
        """Parameters of a stage, by name."""
        chosen = {f"layers.{i}": self.layers[i] for i in range(*layers)}
        ends = ([] if layers[0] else ["embedding"]) + (["head"] if layers[1] == LAYERS else [])
        modules = {**({"embedding": self.embedding} if "embedding" in ends else {}), **chosen}
        parameters = {f"{name}.{key}": p for name, module in modules.items() for key, p in module.named_parameters()}
        if "head" in ends:
            tied = self.head.weight is self.embedding.weight
            parameters["embedding.weight" if tied else "head.weight"] = self.head.weight
        return parameters

    def run(self, layers, batch, held, hidden):
        """One stage on the tokens in ``held``; a sum of token losses on the last."""
        tokens = torch.cat([batch.tokens[:, start:stop] for start, stop in held] or [batch.tokens[:, :0]], dim=1)
        x = self.embedding(tokens) if hidden is None else hidden
        for i in range(*layers):
            x = x + torch.tanh(self.layers[i](x))
        if layers[1] < LAYERS:
            return x
        return (
            nn.functional.cross_entropy(self.head(x).flatten(0, 1), (tokens.flatten() + 1) % WORDS, reduction="sum")
            * batch.scale
        )


def batches_of(plan, seed):
    """The micro-batches of every pipeline, of lengths of their own."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [[(p.micro_batch_size, 12 + 3 * ((seed + k) % 3)) for k in range(p.micro_batches)] for p in plan.pipelines]
    total = sum(rows * length for own in shapes for rows, length in own)
    return [[Batch(torch.randint(0, WORDS, shape, generator=generator), 1 / total) for shape in own] for own in shapes]


def one_process(plan, seed, tied):
    model = Model(tied)
    loss = sum(
        model.run((0, LAYERS), batch, [(0, batch.length)], None) for own in batches_of(plan, seed) for batch in own
    )
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.held((0, LAYERS)).items()}


def stages_train_as_one_process(rank, world_size, seeds):
    torch.set_default_dtype(torch.float64)
    made = ProcessGroups()
    for seed in seeds:
        rng = random.Random(seed)
        plan, tied = random_plan(rng, world_size - rng.choice((0, 0, 1)), LAYERS), rng.random() < 0.5
        loss, wanted = one_process(plan, seed, tied)
        model, place = Model(tied), plan.place_of(rank)
        groups = make_boundary_groups(plan, made)
        stage = None if place is None else plan.pipelines[place[0]].stages[place[1]]
        parameters = {} if stage is None else model.held(stage.layers)
        layouts = pipeline_layouts(parameters, plan)
        sync = AsymmetricGradientSync(parameters, layouts, replicas=[p.ranks for p in plan.pipelines], groups=made)
        total = torch.zeros(())
        if stage is not None:

            def compute(batch, hidden, model=model, stage=stage):
                return model.run(stage.layers, batch, held_intervals(stage, batch.length, rank), hidden)

            runner = PipelineRunner(
                neighbours_of(plan, rank, groups, torch.device("cpu")), compute, WIDTH, torch.float64
            )
            value = runner.train(batches_of(plan, seed)[place[0]], sync)
            if value is not None and (stage.inner != "tensor" or rank == stage.ranks[0]):
                total = value
        sync.finish()
        dist.all_reduce(total)
        assert abs(total.item() - loss) < 1e-12, (seed, total.item(), loss)
        norm = torch.stack([g.square().sum() for g in wanted.values()]).sum().sqrt().item()
        assert abs(sync.grad_norm() - norm) < 1e-12, seed
        with torch.no_grad():
            for owned in sync.owned.values():
                owned -= owned.grad
        sync.gather()
        for name, parameter in parameters.items():
            after = Model(tied).held((0, LAYERS))[name] - wanted[name]
            torch.testing.assert_close(parameter.detach(), after.detach(), rtol=0, atol=1e-12)
        sync.close()


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        *((world_size, range(6)) for world_size in (2, 3, 5)),
        *(pytest.param(world_size, range(6, 16), marks=pytest.mark.slow) for world_size in (2, 3, 5)),
    ],
)
def test_unequal_pipelines_train_as_one_process(world_size, seeds):
    run_ranks(stages_train_as_one_process, world_size, world_size, seeds, timeout_s=240)


LENGTH, ROWS, COUNT = 13, 2, 3


def events_of_stages(rank, stages):
    """What a rank posts for a step of a pipeline whose stages pass on what they get, and what it got."""
    torch.set_default_dtype(torch.float64)
    model = PlannedModel(num_layers=len(stages), num_heads=4, num_kv_heads=4)
    plan = Plan(pipelines=(Pipeline(stages=stages, micro_batch_size=ROWS, micro_batches=COUNT),), model=model)
    groups = make_boundary_groups(plan, ProcessGroups())
    batches = [Batch(torch.zeros(ROWS, LENGTH), 1.0) for _ in range(COUNT)]
    wanted = torch.randn(COUNT, ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    stage, turn, got = plan.stage_of(rank), itertools.count(), []

    def compute(_, hidden):
        held = held_intervals(stage, LENGTH, rank)
        own = torch.cat([wanted[next(turn)][:, start:stop] for start, stop in held] or [wanted[0, :, :0]], dim=1)
        if hidden is None:
            return own.requires_grad_()
        got.append(torch.equal(hidden.detach(), own))
        return hidden * 1 if stage is not stages[-1] else hidden.square().sum() / 2

    if stage is None:
        return [], got
    runner = PipelineRunner(neighbours_of(plan, rank, groups, torch.device("cpu")), compute, WIDTH, torch.float64)
    with recording() as events:
        runner.train(batches)
    return events, got


STAGES = {
    "one to four": (Stage(ranks=(0,)), Stage(ranks=(1, 2, 3, 4), inner="tensor")),
    "four to two": (Stage(ranks=(0, 1, 2, 3), inner="tensor"), Stage(ranks=(5, 4), inner="tensor")),
    "two to one to one": (Stage(ranks=(0, 1), inner="tensor"), Stage(ranks=(2,)), Stage(ranks=(3,))),
    "sequence to tensor": (
        Stage(ranks=(0, 1, 2), inner="sequence", schedule=random_schedule(random.Random(1), 3, 4, 4)),
        Stage(ranks=(4, 3), inner="tensor"),
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_an_activation_and_its_gradient_cross_a_boundary_once(name):
    """Bytes that the ranks post, counted by who sends; every rank of the later stages gets what it computes on."""
    stages = [Stage(ranks=s.ranks, layers=(i, i + 1), inner=s.inner, schedule=s.schedule)
              for i, s in enumerate(STAGES[name])]  # fmt: skip
    outcomes = run_ranks(events_of_stages, 6, tuple(stages), nccl_rules=False)
    assert violations([events for events, _ in outcomes]) == []
    sent = [sum(m.num_bytes for call in events if isinstance(call, Call) for m in call.messages
                if m.sends and m.dtype == "float64")  # not the single bytes that connect ranks
            for events, _ in outcomes]  # fmt: skip
    activation = COUNT * ROWS * LENGTH * WIDTH * 8
    ends = [sum(sent[rank] for rank in stage.ranks) / activation for stage in stages]
    assert ends == [1.0, *[2.0] * (len(stages) - 2), 1.0]
    assert all(
        got == [True] * COUNT * any(rank in s.ranks for s in stages[1:]) for rank, (_, got) in enumerate(outcomes)
    )


def lacks_a_parameter(rank):
    plan = Plan(
        pipelines=(Pipeline(stages=(Stage(ranks=(0,), layers=(0, 1)),), micro_batch_size=1, micro_batches=1),
                   Pipeline(stages=(Stage(ranks=(1,), layers=(0, 1)),), micro_batch_size=1, micro_batches=1)),
        model=PlannedModel(num_layers=1, num_heads=1, num_kv_heads=1),
    )  # fmt: skip
    parameters = {"a": nn.Parameter(torch.zeros(2))} | ({"b": nn.Parameter(torch.zeros(2))} if rank else {})
    try:
        pipeline_layouts(parameters, plan)
    except SyncError as error:
        return str(error)


def test_a_parameter_that_one_pipeline_lacks_is_named_on_all_ranks():
    assert (
        run_ranks(lacks_a_parameter, 2)
        == [
            "b takes a gradient in pipelines [1] only, but the plan has 2 pipelines. Train or freeze it in all of them."
        ]
        * 2
    )


def test_an_epoch_of_global_batches_goes_on_where_it_was():
    run_ranks(_check_resumed_batches, 2)


def _check_resumed_batches(rank):
    def loader(num_samples=7):
        rows = [{"input_ids": torch.tensor([i, i + 1]), "labels": torch.tensor([i, i + 1])} for i in range(num_samples)]
        generator = torch.Generator().manual_seed(5)
        return SameBatches(DataLoader(rows, 2, shuffle=True, generator=generator), torch.device("cpu"))

    def read(batches):
        return [batch["input_ids"][:, 0].tolist() for batch in batches]

    whole = loader()
    epochs = [read(whole), read(whole)]
    assert epochs[0] != epochs[1]
    for stop in range(5):
        stopped, resumed = loader(), loader()
        steps = iter(stopped)
        used = [next(steps)["input_ids"][:, 0].tolist() for _ in range(stop)]
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert used + read(resumed) == epochs[0], stop
        assert read(resumed) == epochs[1], stop
    steps = iter(stopped := loader())
    next(steps)
    other = loader(6)
    other.load_state_dict(stopped.state_dict())
    with pytest.raises(BatchError, match="does not give again"):
        next(iter(other))
