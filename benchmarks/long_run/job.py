"""The job of the long run: model, documents, batches, learning rates and evaluation, the same in every process.

Dimension key: L tokens of a row, which packs several documents.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.long_run.examples import documents
from ds_hetero.runtime.data.shards import IGNORE_INDEX

_PRIME = 2_147_483_647  # 2^31 - 1
_ABOVE_POSITIONS = 65_537  # a prime above every position, so that a token and its position give one number


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    Args:
        steps: optimizer steps, one row each.
        rows: of an epoch.
        shortest, longest: tokens of a row.
        evaluate_every, evaluation_rows: an evaluation is the mean loss of the same held-out rows.
        dtype: ``"fp32"``, or ``"bf16"`` with fp32 master weights.
        pause_s: rest after each step while an event is awaited, so that a short run does not end before it.
    """

    steps: int
    rows: int
    shortest: int = 192
    longest: int = 384
    evaluate_every: int = 200
    evaluation_rows: int = 16
    hidden_size: int = 160
    layers: int = 2
    heads: int = 10
    kv_heads: int = 5
    vocabulary: int = 2048
    learning_rate: float = 2e-3
    warm_up_steps: int = 100
    clip: float = 1.0
    dtype: str = "fp32"
    pause_s: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job from the file that `write` has written."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n")

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.steps / self.rows

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of the learning rate: a linear warm-up, then a cosine down to a tenth."""
        if step < self.warm_up_steps:
            return (step + 1) / self.warm_up_steps
        progress = (step - self.warm_up_steps) / max(1, self.steps - self.warm_up_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_model(job: Job) -> Any:
    """Return a Llama whose weights are the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=job.vocabulary,
        hidden_size=job.hidden_size,
        intermediate_size=2 * job.hidden_size,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads,
        max_position_embeddings=max(512, job.longest),
        attn_implementation="sdpa",
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_optimizer(job: Job, parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW with the customary constants of language models."""
    return torch.optim.AdamW(parameters, lr=job.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def make_scheduler(job: Job, optimizer: Any) -> Any:
    """Return the schedule of learning rates."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, job.learning_rate_factor)


def training_rows(job: Job) -> list[dict[str, Tensor]]:
    """Return the rows of an epoch."""
    return _rows(job, documents(job.vocabulary).training, job.rows, seed=1)


def evaluation_rows(job: Job) -> list[dict[str, Tensor]]:
    """Return the rows of an evaluation; their documents are in no row of `training_rows`."""
    return _rows(job, documents(job.vocabulary).held_out, job.evaluation_rows, seed=2)


def _rows(job: Job, texts: Sequence[Tensor], count: int, seed: int) -> list[dict[str, Tensor]]:
    """Pack documents into rows whose lengths are drawn between the job's bounds.

    A row takes documents in a drawn order until it is full; the one that does not fit is cut, and its rest left out.
    """
    draw = random.Random(seed)
    remaining = iter(draw.sample(list(texts), len(texts)))
    rows = []
    for _ in range(count):
        missing = draw.randint(job.shortest, job.longest)
        parts: list[Tensor] = []
        while missing:
            document = next(remaining)[:missing].long()
            parts.append(document)
            missing -= len(document)
        rows.append(_packed(parts))
    return rows


def _packed(documents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return one row of documents, [L] each: position ids begin anew, and no document predicts the next one's begin."""
    labels = [document.clone() for document in documents]
    for of_document in labels:
        of_document[0] = IGNORE_INDEX
    return {
        "input_ids": torch.cat(list(documents)),
        "position_ids": torch.cat([torch.arange(len(document)) for document in documents]),
        "labels": torch.cat(labels),
    }


def as_batch(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return one row as a batch, [1, L] each."""
    (row,) = rows
    return {name: tensor[None] for name, tensor in row.items()}


def make_loader(rows: Sequence[dict[str, Tensor]]) -> Any:
    """Return a loader of single rows, shuffled in every epoch by its own generator."""
    return torch.utils.data.DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=1,
        shuffle=True,
        generator=torch.Generator().manual_seed(7),  # type: ignore[arg-type]
        collate_fn=as_batch,
    )


def tokens_and_checksum(batch: Any) -> tuple[int, int]:
    """Return the number of tokens of a batch or shard, and a checksum of tokens and positions.

    Both add up over the shards of a batch, whichever rank has which token.
    """
    positions = batch["position_ids"]
    is_token = positions >= 0  # a rank without tokens has a placeholder, see `ds_hetero.runtime.data.shards`
    numbers = batch["input_ids"][is_token] * _ABOVE_POSITIONS + positions[is_token]
    return int(is_token.sum()), int((numbers * numbers % _PRIME).sum())
