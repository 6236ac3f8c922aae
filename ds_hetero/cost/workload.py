"""Workload of a cost model: the batch of one replica, and the DeepSpeed settings with which it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import (
    MAX_BATCH,
    MAX_RANKS,
    MAX_SEQ_LEN,
    expect_whole_number,
    is_weight,
    is_whole,
    shortened,
)
from ds_hetero.errors import PlanError
from ds_hetero.models.trained_weights import MAX_RANK, QUANTIZATIONS

OPTIMIZER_BYTES = {
    "adamw": 12.0,  # a master weight and two moments in fp32
    "adamw-8bit": 6.0,  # moments of a byte (arXiv:2110.02861)
    "adamw-bf16": 4.0,  # moments in bf16, no master weight
    "lion": 8.0,
    "muon": 8.0,
    "sgd": 8.0,  # with momentum
    "adafactor": 4.0,  # master weight alone; factored moments of rows and columns are small
}
"""Bytes of optimizer state per trained parameter, the master weight included."""

RING_GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of an element of partial dK and dV that travel between the groups of a ring, by ``Workload.ring_gradients``."""

EXPERT_RULES = ("equal", "by_memory", "by_speed")
"""Rules by which the experts of a layer are divided among ranks; besides there are lists of weights, one per rank."""

BUCKET_BYTES = 25 * 2**20  # default bucket of `AsymmetricGradientSync`; the first is made while all gradients exist


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """Sizes of DeepSpeed's buffers, in elements; the keys are those of its ``zero_optimization``.

    Args:
        optimizer_bytes: temporary bytes of the optimizer's step per parameter: 0 for a fused optimizer, as DeepSpeed's
            and the Trainer's are on GPUs; 8 for torch's AdamW on CPUs, which steps one tensor at a time.
    """

    reduce_bucket: int = 500_000_000  # ``reduce_bucket_size``: gradients being reduced; ZeRO 1 to 3 allocate all of it
    prefetch_bucket: int = 50_000_000  # ``stage3_prefetch_bucket_size``: parameters gathered ahead in one collective
    live_parameters: int = 1_000_000_000  # ``stage3_max_live_parameters``: parameters that stay gathered after use
    sub_group: int = 1_000_000_000  # ``sub_group_size``: parameters that ZeRO-3's optimizer steps at once
    optimizer_bytes: float = 0

    def sync_bytes(self, element_bytes: int) -> int:
        """Bytes of gradients that make a full bucket between pipelines, with ``element_bytes`` per gradient.

        DeepSpeed's default, whether the configuration says it or not, is replaced by `BUCKET_BYTES`: a bucket of 1 GB
        would wait for most layers.
        """
        return BUCKET_BYTES if self.reduce_bucket == Buffers().reduce_bucket else self.reduce_bucket * element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Batch of one replica, and the DeepSpeed settings with which it is trained.

    Args:
        gradient_bytes: bytes of gradient per trained parameter. If it is unknown which parameters are trained
            (``adapter_rank`` 0), the average over all parameters, which is smaller.

    Raises:
        PlanError: a value is out of range; the message names the field and what would be accepted.
    """

    seq_len: int  # tokens of a sequence, over all ranks
    micro_batch: int = 1  # sequences per micro-batch, B
    micro_batches: int = 1  # micro-batches per iteration (gradient accumulation)
    causal: bool = True  # causal attention; HexiSeq's published model ignores this and counts full attention
    zero_stage: int = 3  # 0 to 3
    zero_weights: tuple[float, ...] | None = None  # share of the optimizer state per rank; None for equal shares
    zero_order: tuple[int, ...] | None = None  # position of every rank's share among all shares; None: rank order
    activation_checkpointing: bool = True  # keep only the input of every layer, and compute it again backward
    keep_attention: bool = False  # with checkpointing: keep what attention has computed and received, too
    # Type in which partial dK and dV travel between the groups of a ring; a search keeps it, since bf16 rounds them.
    ring_gradients: str = "fp32"
    tiled_logits: bool = True  # compute the loss in tiles, so that logits of all tokens never exist at once
    tiled_mlp: bool = False  # compute MLPs in tiles, again in the backward: only one tile's inner activations exist
    tile_tokens: int | None = None  # tokens of a sequence in such a tile, key ``"tile_tokens"``; None: default sizes
    element_bytes: int = 2  # bytes of a parameter or an activation (P)
    gradient_bytes: float = 2
    optimizer_bytes: float = 12  # optimizer state per trained parameter; 12: master weight and Adam moments in fp32
    offload_activations: bool = False  # checkpoints are in the host's memory; copying them takes time
    offload_optimizer: bool = False  # the optimizer state is in the host's memory, and the host steps
    offload_parameters: bool = False  # the parameters are in the host's memory; every pass copies them over PCIe
    adapter_rank: int = 0  # rank of LoRA adapters, which alone are trained; 0: all weights are trained
    trains_embedding: bool = False  # embedding and head are trained beside the adapters
    quantization: str | None = None  # format of frozen weights, a key of `QUANTIZATIONS`; None: not quantized
    logit_bytes: float | None = None  # memory that the loss needs per logit; None: as in current transformers
    fused_kernels: bool = False  # Liger's kernels: the loss in tiles, and MLPs that save gate and up alone
    compiled: bool = False  # torch.compile: norms, rotary embedding and activation are one kernel each
    selective_checkpointing: bool = False  # recompute norms and activations alone, instead of whole layers
    buffers: Buffers = Buffers()  # DeepSpeed's buffers
    # Experts live on ranks in numbers by a rule of `EXPERT_RULES`, or by weights of the ranks, and tokens travel to
    # them; None: every rank computes the experts of its own tokens.
    experts: str | tuple[float, ...] | None = None
    data_parallel: int = 1  # replicas that share the ZeRO partition with this one
    zero_within: bool = False  # every node of the cluster owns all model states (``"zero_within": "node"``)
    zero_cluster: Cluster | None = None  # devices of all replicas, over which ZeRO communicates; None: this one's

    def __post_init__(self) -> None:
        limits = {
            "seq_len": MAX_SEQ_LEN,
            "micro_batch": MAX_BATCH,
            "micro_batches": MAX_BATCH,
            "data_parallel": MAX_RANKS,
        }
        for name, maximum in limits.items():
            expect_whole_number(name, getattr(self, name), 1, maximum, PlanError)
        if self.tile_tokens is not None:
            expect_whole_number("tile_tokens", self.tile_tokens, 1, MAX_SEQ_LEN, PlanError)
        if not is_whole(self.zero_stage, 0, 3):
            raise PlanError(f"zero_stage must be 0, 1, 2 or 3, got {shortened(self.zero_stage)}.")
        expect_whole_number("adapter_rank", self.adapter_rank, 0, MAX_RANK, PlanError)
        if self.quantization not in (None, *QUANTIZATIONS) or (self.quantization and not self.adapter_rank):
            raise PlanError(
                f"quantization must be null or, with an adapter_rank, one of {', '.join(QUANTIZATIONS)}, got "
                f"{shortened(self.quantization)}."
            )
        if self.ring_gradients not in RING_GRADIENT_BYTES:
            raise PlanError(
                f"ring_gradients must be one of {', '.join(RING_GRADIENT_BYTES)}, got {shortened(self.ring_gradients)}."
            )
        if self.selective_checkpointing and self.activation_checkpointing:
            raise PlanError(
                "selective_checkpointing and activation_checkpointing are both on, and only one of them can be. "
                "Turn activation_checkpointing off."
            )
        if self.zero_within and (
            self.zero_stage != 3 or self.data_parallel > 1 or self.offload_optimizer or self.offload_parameters
        ):
            raise PlanError(
                "zero_within needs ZeRO stage 3, one replica, and no offload of optimizer or parameters; this workload "
                f"has stage {self.zero_stage}, {self.data_parallel} replicas, "
                f"{'offloads' if self.offload_optimizer or self.offload_parameters else 'no offload'}."
            )
        weights = self.zero_weights
        if weights is not None and not (all(map(is_weight, weights)) and any(weights)):
            raise PlanError(f"zero_weights must be finite weights >= 0, not all 0, got {shortened(weights)}.")
        experts = self.experts
        is_rule = experts is None or experts in EXPERT_RULES
        if not is_rule and not (isinstance(experts, tuple) and all(map(is_weight, experts)) and any(experts)):
            raise PlanError(
                f"experts must be one of {', '.join(EXPERT_RULES)}, or finite weights >= 0, not all 0, got "
                f"{shortened(experts)}."
            )

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step of one replica."""
        return self.seq_len * self.micro_batch * self.micro_batches

    @property
    def memory_savers(self) -> tuple[str, ...]:
        """Settings that save memory and are on, in words: adapters, recomputation, tiles, offloads, divided experts."""
        words = {
            self.trained_in_words: self.adapter_rank > 0,
            "Liger's kernels": self.fused_kernels,
            "selective recomputation": self.selective_checkpointing,
            "activation checkpointing": self.activation_checkpointing and not self.keeps_attention,
            "activation checkpointing that keeps attention": self.keeps_attention,
            "activations in the host's memory": self.offload_activations,
            "tiled loss": self.tiled_logits,
            "tiled MLP": self.tiled_mlp,
            "optimizer state in the host's memory": self.offload_optimizer,
            "parameters in the host's memory": self.offload_parameters,
            self.experts_in_words: self.experts is not None,
        }
        return tuple(word for word, is_on in words.items() if is_on)

    @property
    def keeps_attention(self) -> bool:
        """Whether the recomputation of a layer takes the attention of its forward, and sends no message of it again."""
        return self.keep_attention and self.activation_checkpointing

    @property
    def ring_gradient_bytes(self) -> int:
        """Bytes of an element of partial dK or dV that travels between the groups of a ring."""
        return RING_GRADIENT_BYTES[self.ring_gradients]

    @property
    def experts_in_words(self) -> str:
        """How experts are divided among ranks, such as ``experts by speed`` or ``experts 2, 1, 1``."""
        if isinstance(self.experts, tuple):
            return f"experts {', '.join(f'{weight:.4g}' for weight in self.experts)}"
        return f"experts {str(self.experts).replace('_', ' ')}"

    @property
    def trained_in_words(self) -> str:
        """Name of the trained adapters with their rank, such as ``QLoRA of rank 16``."""
        return f"{'QLoRA' if self.quantization else 'LoRA'} of rank {self.adapter_rank}"

    @property
    def offloads(self) -> bool:
        """Whether activations, optimizer state or parameters are in the host's memory."""
        return self.offload_activations or self.offload_optimizer or self.offload_parameters

    @property
    def has_loss_tiles(self) -> bool:
        """Whether the loss is computed in tiles, so that the logits of all tokens never exist at once."""
        return self.tiled_logits or self.fused_kernels
