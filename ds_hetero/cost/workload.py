"""The input of a cost model: one replica's batch, and how DeepSpeed trains it."""

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
    "adafactor": 4.0,  # factored moments are of rows and columns
}
"""Bytes of optimizer state per trained parameter, the master weight included."""

BUCKET_BYTES = 25 * 2**20  # of `AsymmetricGradientSync`; the first is made while all gradients are still there


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """Sizes of DeepSpeed's buffers in elements, by its keys in ``zero_optimization``; left out, its defaults.

    Args:
        optimizer_bytes: that the optimizer's step makes per parameter; 0 for a fused one, as DeepSpeed's and the
            Trainer's are on GPUs, 8 for torch's AdamW one tensor at a time, its default on CPUs.
    """

    reduce_bucket: int = 500_000_000  # ``reduce_bucket_size``, gradients under way, which ZeRO 1 to 3 allocate whole
    prefetch_bucket: int = 50_000_000  # ``stage3_prefetch_bucket_size``, parameters that arrive while others are used
    live_parameters: int = 1_000_000_000  # ``stage3_max_live_parameters``, which stay gathered after they were used
    sub_group: int = 1_000_000_000  # ``sub_group_size``, parameters that ZeRO-3 steps at once
    optimizer_bytes: float = 0

    def sync_bytes(self, element_bytes: int) -> int:
        """Return the bytes of gradients after which a bucket of pipelines leaves, ``element_bytes`` each on the wire.

        DeepSpeed's default, written or not, stands for `BUCKET_BYTES`: a bucket of 1 GB waits for most layers.
        """
        return BUCKET_BYTES if self.reduce_bucket == Buffers().reduce_bucket else self.reduce_bucket * element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Workload of a training: one replica's batch and how DeepSpeed trains it.

    Args:
        gradient_bytes: bytes of gradient per trained parameter; per parameter, and less, where it is not known which
            are trained (``adapter_rank`` 0).

    Raises:
        PlanError: a number that makes no sense; the message names the field and what would be accepted.
    """

    seq_len: int  # tokens of a sequence, over all ranks
    micro_batch: int = 1  # sequences per micro-batch, B
    micro_batches: int = 1  # micro-batches per iteration (gradient accumulation)
    causal: bool = True  # causal attention; HexiSeq's published model counts full attention whatever this says
    zero_stage: int = 3  # 0 to 3
    zero_weights: tuple[float, ...] | None = None  # share of the optimizer state per rank; None for equal shares
    zero_order: tuple[int, ...] | None = None  # place of every rank's share among all; None where it is the rank's own
    activation_checkpointing: bool = True  # keep only the input of every layer, and compute it again backward
    tiled_logits: bool = True  # compute the loss in tiles, so that logits of all tokens never exist at once
    tiled_mlp: bool = False  # compute MLPs in tiles, again in the backward, so that inner activations are of one
    tile_tokens: int | None = None  # tokens of a sequence in such tiles, as ``"tile_tokens"``; None for usual sizes
    element_bytes: int = 2  # bytes of a parameter or an activation (P)
    gradient_bytes: float = 2
    optimizer_bytes: float = 12  # of state per trained parameter; 12: master weight and Adam moments in fp32
    offload_activations: bool = False  # what checkpointing keeps is in the host's memory; the copies are counted
    offload_optimizer: bool = False  # the optimizer state is in the host's memory, and the host steps
    offload_parameters: bool = False  # the parameters are in the host's memory, and come over the slot in every pass
    adapter_rank: int = 0  # of adapters that are trained beside frozen weights; 0 where all weights are trained
    trains_embedding: bool = False  # embedding and head are trained beside the adapters
    quantization: str | None = None  # of frozen weights, one of `ds_hetero.models.trained_weights.QUANTIZATIONS`
    logit_bytes: float | None = None  # of memory that the loss needs for a logit; None for what today's transformers do
    fused_kernels: bool = False  # Liger's: the loss in tiles, and MLPs that keep gate and up alone
    compiled: bool = False  # torch.compile: norms, rotary embedding and activation are a kernel each
    selective_checkpointing: bool = False  # in the place of whole layers, norms and activations are computed again
    buffers: Buffers = Buffers()  # DeepSpeed's
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
        for name, most in limits.items():
            expect_whole_number(name, getattr(self, name), 1, most, PlanError)
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
        if self.selective_checkpointing and self.activation_checkpointing:
            raise PlanError("selective_checkpointing is in the place of activation_checkpointing. Turn that off.")
        if self.zero_within and (
            self.zero_stage != 3 or self.data_parallel > 1 or self.offload_optimizer or self.offload_parameters
        ):
            raise PlanError(
                "zero_within keeps what ZeRO stage 3 partitions inside nodes, of one replica, on its devices; this has "
                f"stage {self.zero_stage}, {self.data_parallel} replicas, "
                f"{'offloads' if self.offload_optimizer or self.offload_parameters else 'no offload'}."
            )
        weights = self.zero_weights
        if weights is not None and not (all(map(is_weight, weights)) and any(weights)):
            raise PlanError(f"zero_weights must be finite weights >= 0, not all 0, got {shortened(weights)}.")

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.seq_len * self.micro_batch * self.micro_batches

    @property
    def memory_savers(self) -> tuple[str, ...]:
        """Offloads, tiles and recomputation that it trains with, in words."""
        words = {
            self._trained_in_words: self.adapter_rank > 0,
            "Liger's kernels": self.fused_kernels,
            "selective recomputation": self.selective_checkpointing,
            "activation checkpointing": self.activation_checkpointing,
            "activations in the host's memory": self.offload_activations,
            "tiled loss": self.tiled_logits,
            "tiled MLP": self.tiled_mlp,
            "optimizer state in the host's memory": self.offload_optimizer,
            "parameters in the host's memory": self.offload_parameters,
        }
        return tuple(word for word, has in words.items() if has)

    @property
    def _trained_in_words(self) -> str:
        return f"{'QLoRA' if self.quantization else 'LoRA'} of rank {self.adapter_rank}"

    @property
    def offloads(self) -> bool:
        """Something is in the host's memory."""
        return self.offload_activations or self.offload_optimizer or self.offload_parameters

    @property
    def has_loss_tiles(self) -> bool:
        """Logits of all tokens never exist at once."""
        return self.tiled_logits or self.fused_kernels
