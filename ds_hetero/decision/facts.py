"""Facts on the section, the model and the training that the start of a job needs, and the workload made from them.

Each framework's folder in `ds_hetero.frameworks` reads the facts once; nothing in this package sees a DeepSpeed
configuration or a transformers model. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ds_hetero.cost import Workload
from ds_hetero.cost.terms.expert_shares import predicts_experts
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
    spec: ModelSpec | None = None  # its shape for cost models; None if they do not know its layers
    no_spec_reason: str = ""  # why ``spec`` is None
    dtype: str = "bfloat16"  # of its parameters, such as ``"float32"``
    element_bytes: int = 2  # of ``dtype``
    max_seq_len: int | None = None  # tokens of its longest sequence; None if the configuration does not say
    trained_share: float = 1.0  # share of its parameters that are trained
    # Rank of LoRA adapters on all matrices of a layer that have as many weights as the model's adapters; 0 without any.
    adapter_rank: int = 0
    trains_embedding: bool = False  # True: embedding or head are trained beside adapters
    # Format of the frozen weights, a key of `ds_hetero.models.trained_weights.QUANTIZATIONS`; None if not quantized.
    quantization: str | None = None
    causal: bool = True  # True: attention is causal
    checkpointing: bool = False  # True: activations of every layer are checkpointed
    offloads_checkpoints: bool = False  # True: checkpointed activations are offloaded to the host
    head_dim: int | None = None  # elements of a query head, of the widest if layers differ; None if unknown
    softcap: float | None = None  # bound of its attention scores, see `kernels.Scores`; None for no bound
    is_split: bool = True  # True: ranks share sequences; False: every rank runs whole samples

    def expect_spec(self, *, by_memory: bool = False) -> ModelSpec:
        """Return ``spec``. Raises `ModelError`: no cost model describes the model's layers.

        Args:
            by_memory: True if ``"zero_partition": "memory"`` needs the shape, False if a search does; for the message.
        """
        if self.spec is None and by_memory:
            raise ModelError(
                f"{self.no_spec_reason} So the free memory of the ranks cannot be predicted: give "
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
    """Facts of the training from the configuration; a value left out, or still ``"auto"``, has its default here."""

    zero_stage: int = 0  # 0 to 3
    train_batch_size: int | None = None  # sequences of an optimizer step over all replicas, if given
    micro_batch_size: int | None = None  # sequences of a micro-batch, if given
    accumulation_steps: int | None = None  # micro-batches of an optimizer step, if given
    mixed_precision: str | None = None  # data type in which layers are computed; None for the model's own
    autocast: str | None = None  # data type in which torch's autocast computes matmuls; None if it is off
    accumulates_in_fp32: bool = False  # True: gradients are accumulated in fp32
    offloads_optimizer: bool = False  # True: optimizer state is offloaded
    offloads_parameters: bool = False  # True: parameters are offloaded
    sp_size: int | None = None  # sequence-parallel size of the configuration; `sp_size_of` checks it
    optimizer: str = ""  # name of the optimizer, empty if the script makes it
    buffers: Buffers = field(default_factory=Buffers)  # sizes of DeepSpeed's communication buffers


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """All facts that every rank reads before a job starts, and that must agree."""

    section: HeterogeneitySection  # the "heterogeneity" section
    model: ModelFacts
    training: TrainingFacts
    sp_sizes: Mapping[str, int | None] = field(default_factory=dict)  # sequence-parallel size by source
    no_experts_reason: str = ""  # why experts cannot be divided, of a section with ``"experts": "best"``
    # By rank, the name of the catalogue's rates for the attention kernel that will run, empty if it has none; () if no
    # rank has any. It is not compared: ranks may run different kernels.
    attention_rates: tuple[str, ...] = ()


FP32_BYTES, MIXED_PRECISION_BYTES = 4, 2


def workload_of(facts: JobFacts, num_replicas: int, *, on_host: bool) -> Workload:
    """Return the workload of one replica. Raises `PlanError`: the tokens of a sequence are unknown.

    Memory is counted as for Adam, whichever optimizer is configured.

    Args:
        facts: section, model and training of the job; of the section only ``seq_len``, ``zero_partition``,
            ``zero_within``, ``tile_tokens``, ``ring_gradients`` and ``experts`` are read.
        on_host: whether devices are CPUs, so that nothing can be offloaded to the host.
    """
    section, model, training = facts.section, facts.model, facts.training
    weights = section.zero_partition
    stage, trained_share = training.zero_stage, model.trained_share
    offloads = training.offloads_optimizer or training.offloads_parameters
    element_bytes = model.element_bytes if training.mixed_precision is None else MIXED_PRECISION_BYTES
    gradient_bytes = FP32_BYTES if training.accumulates_in_fp32 else element_bytes
    # A master copy in fp32, which ZeRO's optimizers keep even of fp32 parameters; then Adam's two moments.
    master_bytes = 0 if stage == 0 and element_bytes == FP32_BYTES else FP32_BYTES
    optimizer_bytes = master_bytes + 2 * FP32_BYTES
    micro_batch, micro_batches = _batch(training, num_replicas)
    experts = section.experts
    if experts == "best" or num_replicas > 1 or model.spec is None or not predicts_experts(model.spec):
        experts = None
    is_tiled = section.tile_tokens is not None  # without tiles, models return the logits of all tokens of a shard
    return Workload(
        seq_len=_seq_len(facts),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        causal=model.causal,
        zero_stage=stage,
        zero_weights=tuple(weights) if isinstance(weights, list) and num_replicas == 1 else None,
        zero_within=section.zero_within is not None and num_replicas == 1 and stage == 3 and not offloads,
        activation_checkpointing=model.checkpointing,
        tiled_logits=is_tiled,
        tiled_mlp=is_tiled,
        tile_tokens=section.tile_tokens,
        ring_gradients=section.ring_gradients,
        element_bytes=element_bytes,
        gradient_bytes=gradient_bytes * trained_share,
        optimizer_bytes=optimizer_bytes * trained_share,
        offload_activations=model.checkpointing and model.offloads_checkpoints and not on_host,
        offload_optimizer=stage > 0 and not on_host and training.offloads_optimizer,
        offload_parameters=stage == 3 and not on_host and training.offloads_parameters,
        # Only Adam on GPUs is fused; that on CPUs makes two temporaries of every element.
        buffers=replace(training.buffers, optimizer_bytes=2 * FP32_BYTES if on_host else 0),
        experts=tuple(experts) if isinstance(experts, list) else experts,
        data_parallel=num_replicas,
    )


def with_trained_weights(facts: JobFacts, work: Workload) -> Workload:
    """Return the workload with the adapters of the model, and with bytes for each trained parameter.

    Experts that are divided among ranks keep the data type of training: transformers' experts are no linear layers,
    which bitsandbytes packs.
    """
    model = facts.model
    if not model.adapter_rank:
        return work
    return replace(
        work,
        adapter_rank=model.adapter_rank,
        trains_embedding=model.trains_embedding,
        quantization=model.quantization if work.experts is None else None,
        # `workload_of` has averages over all parameters, since it does not know the adapters.
        gradient_bytes=work.gradient_bytes / model.trained_share,
        optimizer_bytes=work.optimizer_bytes / model.trained_share,
    )


def _seq_len(facts: JobFacts) -> int:
    """Return the tokens of a sequence. Raises `PlanError`: neither the section nor the model has them."""
    seq_len = facts.section.seq_len or facts.model.max_seq_len
    if seq_len is None:
        raise PlanError(
            f'"{SECTION}.seq_len" is missing, and {facts.model.name} has no max_position_embeddings. '
            'Give the tokens of the sequences that you train, such as "seq_len": 32768.'
        )
    return seq_len


def _batch(training: TrainingFacts, num_replicas: int) -> tuple[int, int]:
    """Return the sequences of a micro-batch, and the micro-batches of a step, of one replica.

    A missing number follows from the others, as in DeepSpeed: 16 sequences of a step in 4 micro-batches are 4 each.
    """
    steps = training.accumulation_steps or 0  # 0: not set
    step_samples = (training.train_batch_size or 0) // num_replicas
    micro_batch = training.micro_batch_size or step_samples // (steps or 1) or 1
    return micro_batch, steps or max(step_samples // micro_batch, 1)
