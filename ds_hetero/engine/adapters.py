"""Interfaces of the frameworks' adapters; `ds_hetero.engine.trained` has those of the models that they make.

No adapter imports another one. `ds_hetero.registration` puts one adapter of each kind into `Adapters`, where the others
find it, as `Registry.adapters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ds_hetero.decision.facts import ModelFacts
from ds_hetero.engine.forward_mode import Wanted
from ds_hetero.engine.patching import Function, Patches
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.engine.trained.staged_model import StagedModel
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.data.shards import Batch
from ds_hetero.runtime.experts.parts import ExpertParts
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import Plan


class ResultsOfTokens(Protocol):
    """Results for all tokens of a batch, the same on every rank of the replica, with gradients for the backward.

    Args:
        log_probs: [B, L], at i the log-probability of ``labels[:, i]`` given the tokens before it, or given all tokens
            for masked-language models; 0 where the label is -100, and at the first position. None without labels.
    """

    loss: Tensor | None  # mean of the token losses over the replica's labels; None without labels
    log_probs: Tensor | None
    hidden_state: Tensor | None  # [B, L, D] of the last layer; None unless requested
    logits: Tensor | None  # [B, L, V]; None unless requested


FindSplit = Callable[[nn.Module], SplitModel | None]


class ModelAdapter(Protocol):
    """Adapter of the framework that models are made with: transformers."""

    def read_model_facts(self, model: nn.Module) -> ModelFacts:
        """Return facts of a model that is to be split over the sequence. Raises `ModelError`: it cannot be split."""

    def read_facts_of_whole_model(self, model: nn.Module) -> ModelFacts:
        """Return facts of a module that runs whole on its rank; its sequences are not split, so any module will do."""

    def check_quantized(self, model: nn.Module, zero_stage: int) -> None:
        """Raise `ModelError` if quantized weights of the model would not train as in one process."""

    def describe_model(self, model: nn.Module) -> ModelFacts:
        """Return the same facts as `read_model_facts`, for a model that was checked before."""

    def split_model(self, model: nn.Module, replica: Replica, kernel: str | None) -> SplitModel:
        """Switch a model to the attention of a replica."""

    def check_placeable(self, model: nn.Module) -> None:
        """Check that the experts of a model can be divided among ranks. Raises `ModelError`: they cannot."""

    def place_experts(self, model: nn.Module, weights: Sequence[float], replica: Replica) -> ExpertParts:
        """Keep this rank's part of the experts of every layer."""

    def whole_results(self, model: Any, batch: Batch, wanted: Wanted) -> ResultsOfTokens:
        """Return the results of a sharded call for a model that is not split."""

    def containers_of_experts(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that contain all experts of a layer."""

    def keep_attention_function(self, name: str) -> Callable[[], None]:
        """Remember the attention function with this name; return a function that restores it."""

    def cut_model(self, model: nn.Module, plan: Plan, rank: int, tile_tokens: int | None) -> StagedModel:
        """Cut a model: remove everything but the stage of ``rank`` from it."""

    def check_cuttable(self, model: nn.Module) -> None:
        """Check that a model can be cut into stages. Raises `ModelError`: it cannot."""

    def check_stages(self, model: nn.Module, plan: Plan) -> None:
        """Check that a model can be cut as the plan says. Raises `ModelError` or `PlanError`: it cannot."""

    def impossible_stage_kinds(self, model: nn.Module) -> dict[str, str]:
        """Return the kinds of stages (values of ``"inner"``) that this model cannot have, each with the reason."""

    def is_on_meta(self, model: nn.Module) -> bool:
        """Whether a model was built on torch's meta device, without weights."""

    def outputs_with(self, loss: Tensor, measures: Tensor | None) -> Any:
        """Return model outputs with this loss, and with sums over tokens that trainers log, unless these are None."""


class ProcessAdapter(Protocol):
    """Adapter of the framework that counts processes and prepares loaders: accelerate."""

    def asks_for_engine(self, accelerator: Any) -> bool:
        """Whether an Accelerator was made with a configuration that asks for this engine."""

    def objects_of_script(self) -> dict[str, Any]:
        """Return the objects that the latest Accelerator would save beside the engine, by name."""

    def size_of_accelerate(self) -> int | None:
        """Return the sequence-parallel size of accelerate's configuration; None without sequence parallelism."""

    def loaders_over_replicas(
        self, sp_size: int, batches: ReplicaBatches | None, *, evaluates: bool = False
    ) -> AbstractContextManager[None]:
        """Inside the context, let accelerate divide the samples of loaders among replicas, not among ranks.

        Args:
            batches: the batches of every replica, if these are different.
            evaluates: whether the loaders are for evaluation.
        """

    def gathering_over_replicas(self, accelerator: Any) -> AbstractContextManager[None]:
        """Inside the context, let an Accelerator gather one value of each replica, not one of each rank."""

    def gathered_from_replicas(self, stock: Function) -> Function:
        """Wrap ``gather`` or ``gather_object``: inside `gathering_over_replicas` keep one rank's values per replica."""

    def one_process_per_replica(self) -> AbstractContextManager[None]:
        """Inside the context, let accelerate count each replica as one process."""

    def skip_first_batches(self, stock: Function) -> Function:
        """Replace accelerate's ``skip_first_batches``: let it skip batches of our loaders, too."""


class TrainerAdapter(Protocol):
    """Adapter of the library whose trainers derive from the HF Trainer: TRL."""

    @property
    def shorter_outputs(self) -> tuple[str, ...]:
        """Names of classes of outputs that have one column less than the batch, since the last token predicts none."""

    def needs_whole_sequences(self, trainer: object) -> bool:
        """Whether a trainer computes its loss from whole sequences."""

    def expect_known(self, trainer: object) -> None:
        """Check that a trainer is known to train on shards as on one process. Raises `ConfigError`: it is not."""

    def averages_router_losses(self, trainer: object) -> bool:
        """Return whether a trainer averages the auxiliary losses of a step's micro-batches; others add them up."""

    def running_state(self, trainer: object) -> dict[str, Any]:
        """Return a trainer's state that its checkpoints lack. Raises `ConfigError`: some of it cannot be saved."""

    def set_running_state(self, trainer: object, state: dict[str, Any]) -> None:
        """Restore the state that `running_state` returned."""

    def note_constructed(
        self, trainer: Any, patches: Patches, find_split: FindSplit, processes: ProcessAdapter
    ) -> None:
        """Adapt a trainer with sequence parallelism after ``Trainer.__init__``; ``patches`` undo what is replaced."""


@dataclass(frozen=True)
class Adapters:
    """The adapters that this process has installed, one of each kind."""

    models: ModelAdapter
    processes: ProcessAdapter
    trainers: TrainerAdapter
