"""The job in one process, in plain torch: what all other runs are compared with.

    python -m benchmarks.long_run.alone FOLDER [--by-document] [--last-bit]

Two options change rounding alone, so that one sees how far a training moves by it:

    --by-document   every document of a row has a forward and a backward of its own, and gradients add up: every sum
                    over a row's tokens is rounded in another order
    --last-bit      every weight begins as its neighbour among the numbers of fp32, above or below at random
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.long_run.job import (
    Job,
    as_batch,
    evaluation_rows,
    make_loader,
    make_model,
    make_optimizer,
    make_scheduler,
    tokens_and_checksum,
    training_rows,
)
from benchmarks.long_run.records import Records
from ds_hetero.runtime.data.shards import IGNORE_INDEX

RECORDS = "records.jsonl"
_STATE = "state.pt"


def main() -> None:
    """Train the job of a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--by-document", action="store_true")
    parser.add_argument("--last-bit", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = Job.read(options.folder / "job.json")
    train(job, options.folder, by_document=options.by_document, last_bit=options.last_bit)


def train(job: Job, folder: Path, *, by_document: bool, last_bit: bool) -> None:
    """Train from the latest saved state on, or from the start."""
    model = make_model(job)
    if last_bit:
        _move_last_bits(model)
    weights: nn.Module | MasterWeights = model
    if job.dtype == "bf16":
        weights = MasterWeights(model.bfloat16())
    optimizer = make_optimizer(job, weights.parameters())
    scheduler = make_scheduler(job, optimizer)
    parts = {"model": weights, "optimizer": optimizer, "scheduler": scheduler}
    step = _load(folder / _STATE, parts)
    records, held_out = Records(folder / RECORDS), evaluation_rows(job)
    records.drop_half_line()
    records.add("ready", step=step, world_size=1)
    for batch in islice(_batches(job), step, job.steps):
        began_s = time.perf_counter()
        learning_rate = optimizer.param_groups[0]["lr"]
        loss = sum(_backward(model, part, share) for part, share in _parts(batch, by_document))
        if isinstance(weights, MasterWeights):
            weights.take_gradients()
        norm = clip_gradients(weights.parameters(), job.clip)
        optimizer.step()
        if isinstance(weights, MasterWeights):
            weights.give_weights()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        tokens, checksum = tokens_and_checksum(batch)
        numbers = {"loss": loss, "norm": norm, "lr": learning_rate, "tokens": tokens}
        records.add("step", step=step, **numbers, checksum=checksum, seconds=time.perf_counter() - began_s)
        if step % job.evaluate_every == 0 or step == job.steps:
            records.add("evaluation", step=step, loss=evaluate(model, held_out))
            _save(folder / _STATE, step, parts)
    records.add("done", step=step)


def clip_gradients(parameters: Iterable[nn.Parameter], largest_norm: float) -> float:
    """Scale gradients down to a norm, as torch's ``clip_grad_norm_``; return the norm before.

    The norm is summed in float64, as DeepSpeed does it. That of torch is summed in the gradients' dtype: in the first
    steps of the job in fp32 it was 1e-5 too small, a hundred times what all other rounding does to a step.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, largest_norm / (norm + 1e-6)))
    return norm


def evaluate(model: Any, rows: list[dict[str, Tensor]]) -> float:
    """Return the mean loss of rows."""
    model.eval()
    with torch.no_grad():
        losses = [float(model(**as_batch([row])).loss) for row in rows]
    model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def _move_last_bits(model: nn.Module) -> None:
    """Replace every weight by the next number of fp32 above or below."""
    generator = torch.Generator().manual_seed(11)
    for weight in model.parameters():
        direction = torch.rand(weight.shape, generator=generator) - 0.5
        weight.copy_(torch.nextafter(weight, weight + direction))


def _parts(batch: dict[str, Tensor], by_document: bool) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Yield the parts of a batch that are trained one after another, each with its share of the labels."""
    if not by_document:
        yield batch, 1.0
        return
    begins = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    num_labels = int((batch["labels"] != IGNORE_INDEX).sum())
    for begin, end in pairwise([*begins, batch["input_ids"].shape[1]]):
        if end - begin > 1:  # a document's first token is not predicted
            yield {name: tensor[:, begin:end] for name, tensor in batch.items()}, (end - begin - 1) / num_labels


def _backward(model: nn.Module, part: dict[str, Tensor], share: float) -> float:
    """Add the gradients of a part's loss, times its share; return this product."""
    loss = model(**part).loss * share
    loss.backward()
    return loss.item()


def _batches(job: Job) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of all epochs."""
    loader = make_loader(training_rows(job))
    while True:
        yield from loader


class MasterWeights:
    """Weights in fp32 of a model in bf16, as mixed precision in DeepSpeed trains.

    Args:
        model: in bf16.
    """

    def __init__(self, model: nn.Module) -> None:
        self._halves = list(model.parameters())
        self._masters = [nn.Parameter(half.detach().float()) for half in self._halves]

    def parameters(self) -> list[nn.Parameter]:
        """Return the weights in fp32, for the optimizer."""
        return self._masters

    def take_gradients(self) -> None:
        """Move the gradients of the model to the weights in fp32."""
        for master, half in zip(self._masters, self._halves, strict=True):
            master.grad = None if half.grad is None else half.grad.float()
            half.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the weights in fp32 to those of the model."""
        for master, half in zip(self._masters, self._halves, strict=True):
            half.copy_(master)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return the weights in fp32."""
        return {"masters": [master.detach() for master in self._masters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Set the weights in fp32, and with them those of the model."""
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        self.give_weights()


def _save(path: Path, step: int, parts: dict[str, Any]) -> None:
    """Save everything; the earlier state stays until the new one is whole."""
    unfinished = path.with_suffix(".unfinished")
    torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, unfinished)
    os.replace(unfinished, path)


def _load(path: Path, parts: dict[str, Any]) -> int:
    """Load the saved state, if there is one; return its step."""
    if not path.exists():
        return 0
    state = torch.load(path)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


if __name__ == "__main__":
    main()
