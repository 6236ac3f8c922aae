"""Ways to run one packed batch on unequal ranks: one attention layer, or whole training steps.

    stream          this engine; the batch is sharded by its length alone, tokens by speed
    over all        every document over all ranks, zigzag, tokens by speed: TransformerEngine's context parallelism
    documents       this engine's default: placed by documents if the predicted gain exceeds the predictions' error
    stock           DeepSpeed's Ulysses; inside its all-to-all, attention of one document after the other
    one rank alone  rank 0 with the whole batch, nothing sent
    all at once     every rank with some KV heads of the whole batch, by speed; nothing sent (`AtOnce`)

Stock DeepSpeed has no kernel for CPUs that separates documents (on GPUs it uses flash-attn), so it gets the kernel of
the others here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure.contenders import Contender, Shape, contiguous_positions
from benchmarks.measure.models import VOCABULARY, trained_model
from ds_hetero.cluster.step_errors import PROFILED_ERROR
from ds_hetero.planner.documents import DocumentPlacer, UnitCosts, least_gain
from ds_hetero.runtime.attention import kernels
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import agree_on_batch
from ds_hetero.runtime.attention.kernels import Band, SavedForward, Scores
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.attention.shard_placement import KnownPlacement
from ds_hetero.runtime.documents import POSITIONS, position_runs
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.baselines import proportional
from ds_hetero.values.placement import Lane, Placement, Range, Rows, stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.splits import share

STREAM, OVER_ALL, DOCUMENTS, STOCK, ALONE = "stream", "over all", "documents", "stock", "one rank alone"
AT_ONCE = "all at once"
_CAUSAL = Band(None, 0)
_IGNORED = -100


@dataclass(frozen=True)
class PackedBatch:
    """A batch of one row that consists of documents.

    Args:
        lengths: tokens of every document.
    """

    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)

    @property
    def squares(self) -> int:
        """Sum of the squared lengths."""
        return sum(length * length for length in self.lengths)

    @property
    def documents(self) -> tuple[Range, ...]:
        """Intervals of the documents in the row."""
        return tuple(pairwise(accumulate(self.lengths, initial=0)))

    @property
    def position_ids(self) -> Tensor:
        """[1, tokens]; positions restart at 0 in every document."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None]

    def place(self, name: str, schedule: Schedule, costs: UnitCosts) -> Placement:
        """Return the placement of this batch by the contender ``name``."""
        rows = (Rows(0, 1, self.documents),)
        if name == STREAM:
            return stream_placement(schedule, self.tokens, rows)
        if name == DOCUMENTS:
            return DocumentPlacer(costs, least_gain=least_gain(PROFILED_ERROR))(schedule, self.tokens, rows)
        weights = [1 / seconds for seconds in costs.square_s]
        tokens = tuple(share(length, weights) for length in self.lengths)
        members = tuple(range(schedule.ring_size))
        lane = Lane(members=members, spans=self.documents, tokens=tokens, layout="zigzag")
        unit_tokens = tuple(map(sum, zip(*tokens, strict=True)))
        return Placement(schedule=schedule, length=self.tokens, rank_tokens=unit_tokens, lanes=(lane,), rows=rows)


# --- one attention layer ----------------------------------------------------------------------------------------------


def layer_actions(
    batch: PackedBatch,
    shape: Shape,
    speeds: Sequence[float],
    costs: UnitCosts,
    names: Sequence[str] = (STREAM, OVER_ALL, DOCUMENTS),
) -> tuple[dict[str, Callable[[], object]], dict[str, Placement]]:
    """Return by contender the forward and backward of one layer, and the placements; on every rank."""
    schedule = proportional(speeds, shape.num_heads, shape.num_kv_heads)
    replica = make_replica(Plan.of_replicas([schedule]))
    spec = AttentionSpec(kernels.select(torch.device("cpu"), torch.float32, shape.head_dim, None, None))
    positions = batch.position_ids
    actions: dict[str, Callable[[], object]] = {}
    placements = {name: batch.place(name, schedule, costs) for name in names}
    for name, placement in placements.items():
        known_placement = KnownPlacement(
            placement=placement, documents_from=POSITIONS, position_runs=position_runs(positions)
        )
        held_positions = placement.positions(dist.get_rank())
        shard = LocalBatch(
            batch_size=1,
            tokens=len(held_positions),
            dtype=torch.float32,
            position_ids=positions[:, held_positions],
            placement=placement,
        )

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            _: Tensor,
            shard: LocalBatch = shard,
            known_placement: KnownPlacement = known_placement,
        ) -> Tensor:
            batch_layout = agree_on_batch(replica, shard, recent=[known_placement])
            return attention(q, k, v, replica, batch_layout, spec).flatten(2)

        contender = Contender(name, lambda length, held_positions=held_positions: held_positions, attend)  # type: ignore[misc]
        actions[name] = contender.layer(shape, batch.tokens)
        actions[name]()
    return actions, placements


def alone_layer(batch: PackedBatch, shape: Shape) -> Callable[[], object]:
    """Return an action that computes the whole batch on rank 0; the other ranks do nothing."""
    return WholeDocuments(batch, shape, shape.num_kv_heads) if dist.get_rank() == 0 else lambda: None


class WholeDocuments:
    """Attention over some KV heads and their queries, with one kernel call per document and pass; it has run once.

    The kernel is this engine's. Tensors have the layout of a model's projections, as those of all contenders do.

    Args:
        batch: the documents.
        shape: of the layer.
        kv_heads: the KV heads of ``shape`` to compute.

    Attributes:
        cpu_s: CPU seconds of the runs so far, by document.
    """

    def __init__(self, batch: PackedBatch, shape: Shape, kv_heads: int) -> None:
        heads = (kv_heads * shape.num_heads // shape.num_kv_heads, kv_heads, kv_heads)
        full_tensors = [torch.randn(1, batch.tokens, h, shape.head_dim).transpose(1, 2) for h in (*heads, heads[0])]
        self._documents = list(zip(*(x.split(batch.lengths, dim=2) for x in full_tensors), strict=True))
        self._kernel = kernels.select(torch.device("cpu"), torch.float32, shape.head_dim, None, None)
        self._scores = Scores(scale=shape.head_dim**-0.5)
        self.cpu_s = [0.0] * len(batch.lengths)
        self()

    def __call__(self) -> None:
        """Run the forward of all documents, then the backward."""
        saved, times = [], [time.thread_time()]
        for q, k, v, _ in self._documents:
            saved.append(SavedForward(q, k, v, *self._kernel.forward(q, k, v, self._scores, _CAUSAL)))
            times.append(time.thread_time())
        for of_document, (*_, dout) in zip(saved, self._documents, strict=True):
            self._kernel.backward(dout, of_document, self._scores, _CAUSAL)
            times.append(time.thread_time())
        steps = [end - begin for begin, end in pairwise(times)]
        for i in range(len(self.cpu_s)):
            self.cpu_s[i] += steps[i] + steps[i + len(self.cpu_s)]


class AtOnce:
    """Attention of the whole batch on all ranks at once, each with some KV heads and their queries; nothing is sent.

    The time of one rank alone is no bound for several ranks on one machine, because they share caches and memory. The
    sum of their rates at the same time is a bound: it divides the batch into pieces of any size, without a message.

    Args:
        batch: the documents.
        shape: of the layer.
        speeds: of the ranks; KV heads are divided by them, so that all ranks are busy for about as long.

    Attributes:
        seconds: of this rank, by run.

    Caller: every rank.
    """

    def __init__(self, batch: PackedBatch, shape: Shape, speeds: Sequence[float]) -> None:
        kv_heads = max(round(shape.num_kv_heads * speeds[dist.get_rank()] / max(speeds)), 1)
        self._lengths = torch.tensor(batch.lengths, dtype=torch.float64)
        self._part = kv_heads / shape.num_kv_heads
        self._run = WholeDocuments(batch, shape, kv_heads)
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """Compute this rank's KV heads, and record the seconds."""
        begin = time.perf_counter()
        self._run()
        self.seconds.append(time.perf_counter() - begin)

    def rates(self) -> list[list[float]]:
        """Return the batches per second of every rank, by run. Caller: every rank."""
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, [self._part / seconds for seconds in self.seconds])
        return [list(of_run) for of_run in zip(*by_rank, strict=True)]

    def edge_tokens(self) -> float:
        """Fit e such that documents of n tokens cost in proportion to n² + e n, over the documents of rank 0.

        Kernels waste some work on a document's diagonal, and most of a short document is its diagonal. Caller: every
        rank.
        """
        seconds = torch.tensor(self._run.cpu_s, dtype=torch.float64)
        by_square, by_token = torch.linalg.lstsq(torch.stack([self._lengths**2, self._lengths], 1), seconds).solution
        edge = (by_token / by_square).clamp(min=0)
        dist.broadcast(edge, src=0)
        return float(edge)


def _attend_in_documents(batch: PackedBatch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return torch's causal attention of one document after the other; all tensors are [B, H, tokens, D]."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    parts = [x.split(batch.lengths, dim=2) for x in (q, k, v)]
    return torch.cat([sdpa(*part, is_causal=True, enable_gqa=True) for part in zip(*parts, strict=True)], dim=2)


# --- whole training steps ---------------------------------------------------------------------------------------------


def step_actions(
    batch: PackedBatch, shape: Shape, speeds: Sequence[float], costs: UnitCosts, names: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """Return by contender one training step of a small Llama through DeepSpeed, with the loader's work."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    schedule = proportional(speeds, shape.num_heads, shape.num_kv_heads)
    actions: dict[str, Callable[[], object]] = {}
    if STOCK in names:  # before any of ours
        actions[STOCK] = _stock_step(batch, shape)
    for name in names:
        if name not in (STOCK, ALONE):
            actions[name] = engine_step(name, batch, shape, schedule, costs)
    if ALONE in names:
        actions[ALONE] = alone_step(batch, shape)
    for action in actions.values():
        action()
    return actions


def _engine_for(model: Any, mpu: Any = None, **config: Any) -> Any:
    import deepspeed

    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        **config,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config, mpu=mpu)[0]


def _whole(batch: PackedBatch) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (1, batch.tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, [start for start, _ in batch.documents]] = _IGNORED
    return {"input_ids": ids, "labels": labels, "position_ids": batch.position_ids}


def _shifted(full_tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.nn.functional.pad(full_tensors["labels"][:, 1:], (0, 1), value=_IGNORED)


def engine_step(
    name: str,
    batch: PackedBatch,
    shape: Shape,
    schedule: Schedule,
    costs: UnitCosts,
    replan: Mapping[str, Any] | None = None,
) -> Callable[[], object]:
    """Return a training step of this engine with the placements of ``name``; every rank calls it in the same order."""
    import ds_hetero

    handle = ds_hetero.register()
    section = {
        "schedule": schedule.to_dict(),
        "placement": "stream" if name == STREAM else "documents",
        "checks": {"compare_every": "off"},
        "replan": dict(replan or {}),
    }
    model = trained_model(shape, batch.tokens, "sdpa")
    engine = _engine_for(model, sequence_parallel_size=dist.get_world_size(), heterogeneity=section)
    engine_handle = handle.for_engine(engine)
    if name != STREAM:
        trained = handle.registry.find(model)
        assert trained is not None and trained.sequences is not None
        trained.sequences.placement.use(lambda schedule, length, rows=(): batch.place(name, schedule, costs))
    shards = iter(engine_handle.dataloader(repeat(_whole(batch)), batches="same"))

    def step() -> float:
        shard = next(shards)
        loss = engine_handle.loss(engine(**shard), shard)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _packed_attention(batch: PackedBatch, name: str) -> None:
    """Register attention inside the documents of ``batch`` with transformers; return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **_: Any) -> tuple[Tensor, None]:
        return _attend_in_documents(batch, q, k, v).transpose(1, 2), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


def _stock_step(batch: PackedBatch, shape: Shape) -> Callable[[], object]:
    """Return a training step of stock DeepSpeed Ulysses."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from torch.distributed._functional_collectives import all_gather_single

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    name = f"packed {batch.tokens} {len(batch.lengths)} {batch.squares}"
    _packed_attention(batch, name)
    model = trained_model(shape, batch.tokens, name)
    parallel_state_sp._release_sequence_parallel_groups()  # it has one registration per process, of the batch before
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation=name, sequence_parallel_size=num_ranks, micro_batch_size=1
    )
    engine = _engine_for(model, mpu, sequence_parallel_size=num_ranks)
    whole_batch = _whole(batch)
    held_positions = contiguous_positions(batch.tokens, rank, num_ranks)
    ids, positions, labels = (
        x[:, held_positions] for x in (whole_batch["input_ids"], whole_batch["position_ids"], _shifted(whole_batch))
    )
    group = mpu.get_sequence_parallel_group()

    def step() -> float:
        logits = engine(input_ids=ids, position_ids=positions).logits
        loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=VOCABULARY)
        losses = all_gather_single(loss[None], 0, group)
        counts = all_gather_single(labels.ne(_IGNORED).sum()[None], 0, group)
        loss = (losses * counts).sum() / counts.sum()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def alone_step(batch: PackedBatch, shape: Shape) -> Callable[[], object]:
    """Return a training step on rank 0 alone, without any engine."""
    if dist.get_rank() != 0:
        return lambda: None
    name = f"alone {batch.tokens} {len(batch.lengths)} {batch.squares}"
    _packed_attention(batch, name)
    model = trained_model(shape, batch.tokens, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole_batch = _whole(batch)
    labels = _shifted(whole_batch)

    def step() -> float:
        logits = model(input_ids=whole_batch["input_ids"], position_ids=whole_batch["position_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
