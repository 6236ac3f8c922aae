"""Train a few steps behind DeepSpeed, and measure the peak memory of every rank.

Counted are allocations and releases of torch's CPU allocator, as its profiler reports them, from before the model is
built. On a GPU ``torch.cuda.max_memory_allocated`` counts the same.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_hetero.cost.workload import Buffers, Workload
from ds_hetero.models import model_from_config
from ds_hetero.models.shapes import ModelSpec

if TYPE_CHECKING:
    import torch

STEPS = 4
BUCKET_ELEMENTS = 512 * 512  # what transformers' "auto" comes to


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a schedule and the settings of training.

    Args:
        name: for people.
        schedule: content of a schedule file.
        seq_len: tokens of a sequence.
        zero_stage: 0 to 3.
        checkpointing: whether every layer is recomputed.
        bf16: whether to train in bf16 with fp32 master weights.
        zero_weights: shares of the optimizer state; None for equal ones.
        micro_batch: sequences of a batch.
        model: keys of a Llama's config that differ from `_MODEL`.
        adapter_rank: of adapters beside every linear layer, which alone are trained; 0 to train all weights.
        quantized: whether the weights of the layers are frozen in 4 bits.
    """

    name: str
    schedule: dict[str, Any]
    seq_len: int
    zero_stage: int
    checkpointing: bool = False
    bf16: bool = False
    zero_weights: tuple[float, ...] | None = None
    micro_batch: int = 1
    model: tuple[tuple[str, Any], ...] = ()
    adapter_rank: int = 0
    quantized: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the schedule."""
        return sum(len(group["ranks"]) for group in self.schedule["groups"])

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {**_MODEL, **dict(self.model), "max_position_embeddings": self.seq_len}

    @property
    def spec(self) -> ModelSpec:
        """The model in the cost model."""
        return model_from_config(self.config, "llama")

    @property
    def workload(self) -> Workload:
        """The training in the cost model."""
        element = 2 if self.bf16 else 4
        return Workload(
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            zero_stage=self.zero_stage,
            zero_weights=self.zero_weights,
            activation_checkpointing=self.checkpointing,
            tiled_logits=False,
            element_bytes=element,
            gradient_bytes=element,
            optimizer_bytes=8 if self.zero_stage == 0 and not self.bf16 else 12,
            adapter_rank=self.adapter_rank,
            quantization="nf4" if self.quantized else None,
            buffers=Buffers(reduce_bucket=BUCKET_ELEMENTS, optimizer_bytes=8),
        )


_MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "hidden_act": "silu",
    "use_cache": False,
}


def measure(rank: int, report: Any, case: dict[str, Any]) -> int:
    """Train `STEPS` steps on a rank; return the bytes that it holds at the peak of a step.

    The profiler does not see a release on one of gloo's threads until the address is allocated again, which can only
    raise the result. So the bytes that stay between steps, and the bytes that a step adds, are each the least over all
    steps but the first, which makes permanent allocations.
    """
    from benchmarks.measure.allocations import held_by_runs, marked_run

    def train() -> None:
        step = make_step(rank, Case(**case))
        for _ in range(STEPS):
            gc.collect()
            with marked_run():
                step()

    gc.collect()
    steps = held_by_runs(train)
    rests, rises = [rest for rest, _ in steps[1:]], [peak - rest for rest, peak in steps[1:]]
    return int(min(rests) + min(rises))


def make_step(rank: int, case: Case) -> Any:
    """Build model and engine of a case; return a function that trains one step."""
    import deepspeed
    import torch

    import ds_hetero
    from ds_hetero.values.placement import stream_placement

    deepspeed.init_distributed("gloo", verbose=False)
    handle = ds_hetero.register()
    section: dict[str, Any] = {"schedule": case.schedule, "checks": {"compare_every": "off"}}
    if case.zero_weights is not None:
        section["zero_partition"] = list(case.zero_weights)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "zero_optimization": {"stage": case.zero_stage, "reduce_bucket_size": BUCKET_ELEMENTS},
        "bf16": {"enabled": case.bf16},
        "sequence_parallel_size": case.num_ranks,
        "heterogeneity": section,
    }
    torch.manual_seed(0)
    model = _model(case, config)
    if case.checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    positions = stream_placement(handle.schedule, case.seq_len).positions(rank)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(case.config["vocab_size"], (case.micro_batch, case.seq_len), generator=generator)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    shard = {
        "input_ids": ids[:, positions],
        "position_ids": torch.tensor([positions] * case.micro_batch),
        "shift_labels": labels[:, positions],
    }

    def step() -> None:
        outputs = engine(input_ids=shard["input_ids"], position_ids=shard["position_ids"])
        loss = handle.loss(outputs, shard)
        del outputs
        engine.backward(loss)
        engine.step()

    return step


def _model(case: Case, config: dict[str, Any]) -> Any:
    """Return the model of a case, with its adapters; ``config`` is DeepSpeed's."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with deepspeed.zero.Init(config_dict_or_path=config) if _starts_in_parts(case) else nullcontext():
        model = LlamaForCausalLM(LlamaConfig(**case.config))
    if case.quantized:
        model = in_4_bits(model, torch.bfloat16 if case.bf16 else torch.float32, torch.device("cpu"))
    if not case.adapter_rank:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=case.adapter_rank, target_modules="all-linear")).train()


def _starts_in_parts(case: Case) -> bool:
    """Return whether ZeRO-3 partitions the model while it is made.

    Bitsandbytes needs whole weights, partitioned later.
    """
    return case.zero_stage == 3 and not case.quantized


def in_4_bits(model: Any, dtype: torch.dtype, where: torch.device) -> Any:
    """Return the model with its layers' weights quantized by bitsandbytes as in QLoRA; not embedding and head."""
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict={name: weight.cpu() for name, weight in model.state_dict().items()},
        quantization_config=quantization,
        device_map={"": where},
        dtype=dtype,
    )
