"""Facts of the outside world for the start of a job, as values.

Each framework's folder in `ds_hetero.frameworks` reads them once; nothing in this package sees a configuration of
DeepSpeed's or a model of transformers'. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_hetero.cost.workload import Buffers
from ds_hetero.errors import ModelError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.section import SECTION, HeterogeneitySection


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts of a model for the start of a job.

    Args:
        name: the model's class, or its preset.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        spec: its shape, as cost models see it; None where none describes its layers.
        no_spec_reason: why ``spec`` is None.
        dtype: of its parameters, such as ``"float32"``.
        element_bytes: of ``dtype``.
        max_seq_len: tokens of the longest sequence that it is made for; None where it does not say.
        trained_share: share of its parameters that are trained.
        causal: whether its attention is causal.
        checkpointing: whether the activations of every layer are checkpointed.
        offloads_checkpoints: whether what is checkpointed is kept in the host's memory.
        head_dim: width of a head, of the widest where layers differ; None where the model does not say.
        softcap: bound of its attention scores, see `ds_hetero.runtime.attention.kernels.Scores`; None for no bound.
        is_split: whether it is switched to our attention; False for a module that every rank runs whole.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    spec: ModelSpec | None = None
    no_spec_reason: str = ""
    dtype: str = "bfloat16"
    element_bytes: int = 2
    max_seq_len: int | None = None
    trained_share: float = 1.0
    causal: bool = True
    checkpointing: bool = False
    offloads_checkpoints: bool = False
    head_dim: int | None = None
    softcap: float | None = None
    is_split: bool = True

    def expect_spec(self, *, by_memory: bool = False) -> ModelSpec:
        """Return the shape.

        Args:
            by_memory: it is needed for ``"zero_partition": "memory"``, and not for a schedule.

        Raises:
            ModelError: no cost model describes the model's layers.
        """
        if self.spec is None and by_memory:
            raise ModelError(
                f"{self.no_spec_reason} So what the ranks have left of their memory is not known: give "
                f'"{SECTION}.zero_partition" a list of weights, one per rank, or "uniform".'
            )
        if self.spec is None:
            raise ModelError(
                f'{self.no_spec_reason} So no schedule can be searched for: give "{SECTION}.schedule" a schedule file, '
                'or a strategy without a search, such as "proportional".'
            )
        return self.spec


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """Facts of the training from the configuration. A value that is left out or still ``"auto"`` has its default.

    Args:
        zero_stage: 0 to 3.
        train_batch_size: sequences of an optimizer step over all replicas, if given.
        micro_batch_size: sequences of a micro-batch, if given.
        accumulation_steps: micro-batches of an optimizer step, if given.
        mixed_precision: data type in which layers are computed, if it is not the model's own.
        accumulates_in_fp32: gradients are accumulated in fp32 whatever ``mixed_precision`` is.
        offloads_optimizer: optimizer states are kept off the device.
        offloads_parameters: parameters are kept off the device.
        sp_size: sequence-parallel size as it is written; `ds_hetero.decision.resolve.sp_size_of` checks it.
        optimizer: name of the optimizer, empty if the script makes it.
        buffers: DeepSpeed's.
    """

    zero_stage: int = 0
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    mixed_precision: str | None = None
    accumulates_in_fp32: bool = False
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    sp_size: int | None = None
    optimizer: str = ""
    buffers: Buffers = field(default_factory=Buffers)


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Everything that is read before a job starts; every rank reads its own, and they must agree.

    Args:
        section: the "heterogeneity" section.
        model: what is trained.
        training: how it is trained.
        sp_sizes: sequence-parallel sizes by the name under which the user knows their source.
    """

    section: HeterogeneitySection
    model: ModelFacts
    training: TrainingFacts
    sp_sizes: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def computed_dtype(self) -> str:
        """The data type in which layers are computed."""
        return self.training.mixed_precision or self.model.dtype
