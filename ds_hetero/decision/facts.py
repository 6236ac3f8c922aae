"""Facts of the outside world for the start of a job, as values, and the workload that cost models see.

Each framework's folder in `ds_hetero.frameworks` reads them once; nothing in this package sees a configuration of
DeepSpeed's or a model of transformers'. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ds_hetero.cost import Workload
from ds_hetero.cost.workload import Buffers
from ds_hetero.errors import ModelError, PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.section import SECTION, HeterogeneitySection

NO_MODEL = "no model was given."


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts of a model for the start of a job."""

    name: str  # the model's class, or its preset
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads
    spec: ModelSpec | None = None  # its shape, as cost models see it; None where none describes its layers
    no_spec_reason: str = ""  # why ``spec`` is None
    dtype: str = "bfloat16"  # of its parameters, such as ``"float32"``
    element_bytes: int = 2  # of ``dtype``
    max_seq_len: int | None = None  # tokens of the longest sequence that it is made for; None where it does not say
    trained_share: float = 1.0  # share of its parameters that are trained
    causal: bool = True  # whether its attention is causal
    checkpointing: bool = False  # whether the activations of every layer are checkpointed
    offloads_checkpoints: bool = False  # whether what is checkpointed is kept in the host's memory
    head_dim: int | None = None  # width of a head, of the widest where layers differ; None where the model does not say
    softcap: float | None = None  # bound of its attention scores, see `kernels.Scores`; None for no bound
    is_split: bool = True  # whether it is switched to our attention; False for a module that every rank runs whole

    def expect_spec(self, *, by_memory: bool = False) -> ModelSpec:
        """Return the shape. Raises `ModelError`: no cost model describes the model's layers.

        Args:
            by_memory: it is needed for ``"zero_partition": "memory"``, and not for a schedule.
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
    """Facts of the training from the configuration. A value that is left out or still ``"auto"`` has its default."""

    zero_stage: int = 0  # 0 to 3
    train_batch_size: int | None = None  # sequences of an optimizer step over all replicas, if given
    micro_batch_size: int | None = None  # sequences of a micro-batch, if given
    accumulation_steps: int | None = None  # micro-batches of an optimizer step, if given
    mixed_precision: str | None = None  # data type in which layers are computed, if it is not the model's own
    autocast: str | None = None  # data type in which torch's autocast computes products, if it is on
    accumulates_in_fp32: bool = False  # gradients are accumulated in fp32 whatever ``mixed_precision`` is
    offloads_optimizer: bool = False  # optimizer states are kept off the device
    offloads_parameters: bool = False  # parameters are kept off the device
    sp_size: int | None = None  # sequence-parallel size as written; `sp_size_of` checks it
    optimizer: str = ""  # name of the optimizer, empty if the script makes it
    buffers: Buffers = field(default_factory=Buffers)  # DeepSpeed's


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """All that is read before a job starts, by every rank; they must agree."""

    section: HeterogeneitySection  # the "heterogeneity" section
    model: ModelFacts  # what is trained
    training: TrainingFacts  # how it is trained
    sp_sizes: Mapping[str, int | None] = field(default_factory=dict)  # sequence-parallel, by source


FP32_BYTES, MIXED_PRECISION_BYTES = 4, 2


def workload_of(facts: JobFacts, num_replicas: int, *, on_host: bool) -> Workload:
    """Build the workload of one replica. Raises `PlanError`: nothing says how long sequences are.

    What neither the model nor the configuration states, such as an optimizer other than Adam, is assumed to be usual.

    Args:
        facts: of the job; the section's ``seq_len`` and ``zero_partition`` are used.
        on_host: devices are CPUs, so that nothing can be offloaded to the host.
    """
    model, training, weights = facts.model, facts.training, facts.section.zero_partition
    stage, trained = training.zero_stage, model.trained_share
    offloads = training.offloads_optimizer or training.offloads_parameters
    element_bytes = model.element_bytes if training.mixed_precision is None else MIXED_PRECISION_BYTES
    micro_batch, micro_batches = _batch(training, num_replicas)
    master_bytes = 0 if stage == 0 and element_bytes == FP32_BYTES else FP32_BYTES
    return Workload(
        seq_len=_seq_len(facts),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        causal=model.causal,
        zero_stage=stage,
        zero_weights=tuple(weights) if isinstance(weights, list) and num_replicas == 1 else None,
        zero_within=facts.section.zero_within is not None and num_replicas == 1 and stage == 3 and not offloads,
        activation_checkpointing=model.checkpointing,
        tiled_logits=facts.section.tile_tokens is not None,  # else models return the logits of all tokens of a shard
        tiled_mlp=facts.section.tile_tokens is not None,
        tile_tokens=facts.section.tile_tokens,
        element_bytes=element_bytes,
        gradient_bytes=(FP32_BYTES if training.accumulates_in_fp32 else element_bytes) * trained,
        optimizer_bytes=(master_bytes + 2 * FP32_BYTES) * trained,
        offload_activations=model.checkpointing and model.offloads_checkpoints and not on_host,
        offload_optimizer=stage > 0 and not on_host and training.offloads_optimizer,
        offload_parameters=stage == 3 and not on_host and training.offloads_parameters,
        buffers=replace(training.buffers, optimizer_bytes=2 * FP32_BYTES if on_host else 0),  # fused on GPUs alone
        data_parallel=num_replicas,
    )


def _seq_len(facts: JobFacts) -> int:
    seq_len = facts.section.seq_len or facts.model.max_seq_len
    if seq_len is None:
        raise PlanError(
            f'"{SECTION}.seq_len" is missing, and {facts.model.name} has no max_position_embeddings. '
            'Give the tokens of a sequence that are to be planned for, such as "seq_len": 32768.'
        )
    return seq_len


def _batch(training: TrainingFacts, num_replicas: int) -> tuple[int, int]:
    """Sequences of a micro-batch and micro-batches of a step, the missing one from the others as DeepSpeed does."""
    steps, total = training.accumulation_steps or 0, (training.train_batch_size or 0) // num_replicas
    micro = training.micro_batch_size or total // (steps or 1) or 1
    return micro, steps or max(total // micro, 1)
