"""Interfaces of the frameworks' adapters: what the engine and its neighbours ask of each, and the models they make.

No adapter imports another. `ds_hetero.registration` puts one of each kind into `Adapters`, and every adapter finds the
others there, in `Registry.adapters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ds_hetero.common.reading import JsonObject
from ds_hetero.decision.facts import ModelFacts
from ds_hetero.engine.forward_mode import Wanted
from ds_hetero.engine.patching import Function, Patches
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.data.shard_info import ShardInfo
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.pipeline.batches import StageBatch
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks import (
    AsLoaded,
    ClassLoss,
    ComparisonPace,
    GraphChanges,
    LocalWeights,
    TokenFactors,
    TokenWeights,
)
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.placement import Placement, Placer, Rows
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule


class ResultsOfTokens(Protocol):
    """Results of a whole batch, the same on every rank of the replica, with gradients for the engine's backward.

    Args:
        log_probs: [B, L] of ``labels``: at i that of ``labels[:, i]``, given the tokens before it; 0 where the label is
            -100, and at the first position. Of masked-language models, given all tokens. None without labels.
    """

    loss: Tensor | None  # the mean of the token losses over the replica's labels; None without labels
    log_probs: Tensor | None
    hidden_state: Tensor | None  # [B, L, D] of the last layer, where asked for
    logits: Tensor | None  # [B, L, V], where asked for


class BatchChecks(Protocol):
    """Comparisons of a split model with one process, on pieces of the batches that it is to train on."""

    def is_due(self, batch: Batch) -> bool:
        """Whether a batch, as the wrapped loader gave it, can show something new; the same on every rank."""

    def check_batches_of_ranks(self, batches: Sequence[Batch]) -> None:
        """Check the model with batches of this rank; every rank of the world. Raises `ModelError`."""

    def check_same_batch(self, batch: Batch) -> None:
        """Check the model with a whole batch that all ranks of the replica hold, if it can show something new."""

    def check_again(self) -> None:
        """Check the model with what was compared last, since it may have changed. Raises `ModelError`."""


class SplitModel(Protocol):
    """A model that is split over the sequence; its counterpart is `ds_hetero.engine.whole_model.WholeModel`."""

    model: nn.Module
    replica: Replica
    kernel: str | None
    clock: StepClock
    loss_convention: str | None
    latest_positions: Tensor | None
    is_restored: bool
    places_documents: bool
    asked_for_documents: bool
    placer: Placer
    checks: BatchChecks
    token_weights: TokenWeights | None
    token_factors: TokenFactors | None
    local_weights: LocalWeights | None
    pace: ComparisonPace
    graphs: GraphChanges | None
    class_loss: ClassLoss | None
    as_loaded: AsLoaded | None

    @property
    def takes_shards(self) -> bool:
        """Whether a forward without a cache would now take a shard."""

    @property
    def times_forward(self) -> bool:
        """Whether a forward is one of training."""

    @property
    def waits_in_forward(self) -> bool:
        """Whether a forward would now wait for other ranks."""

    @property
    def is_split(self) -> bool:
        """Whether sequences are split; else every replica is one rank, and any batch can run whole."""

    @property
    def trains_now(self) -> bool:
        """Whether a forward would now be one of training, with gradients."""

    @property
    def pools(self) -> bool:
        """Whether its head pools over the sequence, so that only sharded calls can split it."""

    @property
    def cuts_inputs(self) -> bool:
        """Whether forwards take whole sequences, of which the decoder is given this rank's part."""

    @property
    def moves_labels(self) -> bool:
        """Whether a token predicts the label of the next one, and not its own."""

    @property
    def shifts_labels_itself(self) -> bool:
        """Whether its own loss moves labels, so that ours is made from its logits."""

    @property
    def own_loss(self) -> str:
        """Name of the loss function that the script gave the model; empty for cross entropy of tokens."""

    @property
    def class_with_own_forward(self) -> str:
        """Name of the script's class whose forward may compute a loss of its own; empty for a framework's."""

    def expect_tokenwise(self) -> None:
        """Refuse a shard where the head pools over the sequence. Raises `ModelError`."""

    def complete(self, batch: Any) -> Any:
        """Return a whole batch with the positions that the model would make of the whole of it."""

    def place(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch; see `ds_hetero.values.placement.Placer`."""

    def note_shard(self, info: ShardInfo) -> None:
        """Remember the placement of a shard."""

    def router_term(self, outputs: Any) -> Tensor | float:
        """Term that the model adds to the mean loss of its tokens for its routers."""

    def note_scaled_loss(self) -> None:
        """Note that a loss with the scale that the engine's average needs was made of the latest batch."""

    def end_step(self) -> bool:
        """Clear per-step state; return True if batches were run but no loss was scaled."""

    def tile(self, tokens: int) -> None:
        """Compute MLPs and losses of shards in tiles of so many tokens."""

    def verify(self, when: int | str) -> None:
        """Set when `checks` look, see `ds_hetero.values.section.ChecksSection.compare_every`."""

    def declare_loss(self, convention: str | None) -> None:
        """Set `loss_convention`."""

    def declare_evaluation(self, how: str | None) -> None:
        """Set how it is evaluated, by ``"evaluation"`` of the section."""

    @property
    def evaluation(self) -> str:
        """How a framework's own loops evaluate the model: ``"sharded"`` or ``"whole"``."""

    @property
    def why_evaluated_whole(self) -> str:
        """Why evaluation cannot run on shards; empty where it can."""

    @property
    def evaluates_shards(self) -> bool:
        """Whether a forward would now be one of an evaluation over shards, which the section asks for."""

    def place_documents(self, placer: Placer | None, *, asked_for: bool = True) -> None:
        """Place the batches that are drawn from now on by their documents; None: by their length."""

    def record_batches(self, observers: Sequence[Callable[[BatchLayout], None]]) -> None:
        """Call ``observers`` with the layout of every batch from now on."""

    def change_replica(self, replica: Replica) -> None:
        """Go on under another schedule of the same ranks."""

    def keep_alive(self, record: object) -> None:
        """Keep ``record`` alive as long as the model."""

    def restore(self) -> None:
        """Switch the model back."""


FindSplit = Callable[[nn.Module], SplitModel | None]


class ElasticState(Protocol):
    """The state of an engine that outlives its process."""

    events: list[JsonObject]  # of the job, oldest first, on rank 0: ``kind``, ``time`` in seconds since 1970, ``ranks``

    def resume(self, objects: Mapping[str, Any]) -> int | None:
        """Put back the newest save, with the script's ``objects``; the step that the job goes on from, if any."""

    def go_on(self, objects: Mapping[str, Any], found: Any) -> None:
        """Put back a save that was ``found`` before; from here on `after_step` is called by the caller."""

    def after_step(self, step: int) -> None:
        """Commit and save, if a save is due."""

    def end_batch(self) -> None:
        """Save, if a save is due, when a custom loop requests the next batch."""

    def leave_if_due(self) -> None:
        """End this process between two steps, if all ranks have agreed to."""


class StagedModel(Protocol):
    """A model that was cut into stages of pipelines, of which this rank has one.

    Called, it runs a pass of that stage: a `ds_hetero.runtime.pipeline.runner.StageCompute`.
    """

    plan: Plan
    width: int
    dtype: torch.dtype
    is_writer: bool
    measures: Tensor | None
    elastic: ElasticState | None

    @property
    def model(self) -> nn.Module:
        """The user's model, without the parts of other stages."""

    @property
    def configuration(self) -> Entries:
        """The content of config.json of the whole model."""

    def __call__(self, batch: StageBatch, hidden: Tensor | None) -> Tensor:
        """Run the forward of a micro-batch."""

    def shard_sequences(self, replica: Replica, kernel: str | None) -> None:
        """Switch a ``"sequence"`` stage to the attention of its schedule."""

    def cut_by_tensor_parallelism(self, mesh: DeviceMesh) -> None:
        """Keep this rank's shards of a ``"tensor"`` stage."""

    def fill(self, device: torch.device) -> None:
        """Give what this rank holds its memory and values, where the model was built without weights."""

    def time_layers(self, clock: StepClock) -> None:
        """Let a clock take the phases of the stage."""

    def change_layers(self, plan: Plan, device: torch.device) -> None:
        """Hold the layers of another plan, whose ranks and stages are the same."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, by the names of the whole model."""

    def partial_parameters(self) -> frozenset[str]:
        """Return names of parameters whose copies in a ``"tensor"`` stage have parts of a gradient's sum."""

    def save_pretrained(self, folder: str) -> None:
        """Write the weights of all stages, as transformers reads them; on every rank."""


class ModelAdapter(Protocol):
    """Adapter of the framework that models are made with: transformers."""

    def read_model_facts(self, model: nn.Module) -> ModelFacts:
        """Return facts of a model that is to be split over the sequence. Raises `ModelError` where it cannot be."""

    def read_facts_of_whole_model(self, model: nn.Module) -> ModelFacts:
        """Return facts of any module, for replicas of one rank."""

    def check_quantized(self, model: nn.Module, zero_stage: int) -> None:
        """Raise `ModelError` for quantized weights that do not train as on one process."""

    def describe_model(self, model: nn.Module) -> ModelFacts:
        """`read_model_facts` without its checks."""

    def split_model(self, model: nn.Module, replica: Replica, kernel: str | None) -> SplitModel:
        """Switch a model to the attention of a replica."""

    def whole_results(self, model: Any, batch: Batch, wanted: Wanted) -> ResultsOfTokens:
        """Return results of a sharded call of a model that is not split."""

    def containers_of_experts(self, model: nn.Module) -> list[nn.Module]:
        """Modules that hold all experts of a layer."""

    def keep_attention_function(self, name: str) -> Callable[[], None]:
        """Remember the attention function of a name; return what puts it back."""

    def cut_model(self, model: nn.Module, plan: Plan, rank: int, tile_tokens: int | None) -> StagedModel:
        """Keep the stage of ``rank`` of a model."""

    def check_cuttable(self, model: nn.Module) -> None:
        """Refuse a model that cannot be cut into stages. Raises `ModelError`."""

    def check_stages(self, model: nn.Module, plan: Plan) -> None:
        """Refuse a model that cannot be cut as the plan says. Raises `ModelError` and `PlanError`."""

    def impossible_inners(self, model: nn.Module) -> dict[str, str]:
        """Return the ways in which ranks cannot share a stage of this model, each with the reason."""

    def is_on_meta(self, model: nn.Module) -> bool:
        """Whether a model was built without weights."""

    def outputs_with(self, loss: Tensor, measures: Tensor | None) -> Any:
        """Return outputs of a model with a loss, and with sums that trainers log."""


class ProcessAdapter(Protocol):
    """Adapter of the framework that counts processes and prepares loaders: accelerate."""

    def asks_for_engine(self, accelerator: Any) -> bool:
        """Whether an Accelerator was made with a configuration that asks for this engine."""

    def objects_of_script(self) -> dict[str, Any]:
        """Return all that the latest Accelerator would write into a checkpoint beside the engine, by name."""

    def size_of_accelerate(self) -> int | None:
        """Return the sequence-parallel size that accelerate was given; None where it was given none."""

    def loaders_over_replicas(
        self, sp_size: int, batches: ReplicaBatches | None, *, evaluates: bool = False
    ) -> AbstractContextManager[None]:
        """Let loaders that are prepared inside, of evaluation or of training, shard over replicas."""

    def gathering_over_replicas(self, accelerator: Any) -> AbstractContextManager[None]:
        """Let an Accelerator gather one value of each replica inside."""

    def gathered_from_replicas(self, stock: Function) -> Function:
        """Return accelerate's ``gather`` or ``gather_object``, taking only replicas' first ranks where asked to."""

    def one_process_per_replica(self) -> AbstractContextManager[None]:
        """Let accelerate see replicas as its processes inside."""

    def skip_first_batches(self, stock: Function) -> Function:
        """Accelerate's function of that name, which skips steps of our loaders."""


class TrainerAdapter(Protocol):
    """Adapter of the library that derives trainers: TRL."""

    @property
    def shorter_outputs(self) -> tuple[str, ...]:
        """See `ds_hetero.engine.forward_mode.Wanted`."""

    def needs_whole_sequences(self, trainer: object) -> bool:
        """Whether a trainer computes its loss from whole sequences."""

    def expect_known(self, trainer: object) -> None:
        """Refuse a trainer that is not known to train on shards as on one process."""

    def averages_router_losses(self, trainer: object) -> bool:
        """Whether a trainer takes the mean of the routers' losses of a step's micro-batches; others add them up."""

    def running_state(self, trainer: object) -> dict[str, Any]:
        """Return all that a trainer has beside its checkpoints. Raises `ConfigError` where more would be lost."""

    def set_running_state(self, trainer: object, state: dict[str, Any]) -> None:
        """Put back what `running_state` returned."""

    def note_constructed(
        self, trainer: Any, patches: Patches, find_split: FindSplit, processes: ProcessAdapter
    ) -> None:
        """Make ready a trainer with sequence parallelism, after ``Trainer.__init__``; ``patches`` take replacements."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a registration."""

    models: ModelAdapter
    processes: ProcessAdapter
    trainers: TrainerAdapter
