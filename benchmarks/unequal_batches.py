"""Compare unequal with equal batches on two ranks of emulated speeds 3:1: steps per second, and losses of one process.

    python -m benchmarks.unequal_batches [--quick] [--rounds 3] [--json]

A Trainer script and a custom loop each train with equal batches [4, 4], with ``"batch": [6, 2]`` and with
``"by_speed"``, in alternating rounds. Speeds are emulated by sleeping: a rank waits 100 or 300 ms per sample, a third
of it in the forward and the rest in the backward, so that the ranks do not disturb each other on two cores. A step of
equal batches takes 4 samples of the slow rank, the best one 2: no batches can be more than 2.0 times as fast. The first
steps, in which ``"by_speed"`` searches, are not counted. The losses of all steps are compared with those of plain
torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import ranks, results

S_PER_SAMPLE = (0.1, 0.3)  # by rank
SAMPLES, BOUND = 8, 2.0
BATCHES: dict[str, Any] = {"equal": [4, 4], "[6, 2]": [6, 2], "by_speed": "by_speed"}
SCRIPTS = ("Trainer", "own loop")
NOT_COUNTED = 12  # steps
TOKENS, LR, EPSILON = 32, 1e-3, 1e-3


def _model(s_per_sample: float) -> Any:
    """Return a small Llama that sleeps for every sample."""
    import torch

    from benchmarks.measure.contenders import Shape
    from benchmarks.measure.models import trained_model

    def wait(module: Any, inputs: Any, hidden_BLD: Any) -> None:
        seconds = s_per_sample * len(hidden_BLD)
        if torch.is_grad_enabled():  # not where the unit of the loss is found
            time.sleep(seconds / 3)
            hidden_BLD.register_hook(lambda grad: time.sleep(2 * seconds / 3))

    shape = Shape(num_heads=2, num_kv_heads=2, head_dim=16, num_layers=1)
    model = trained_model(shape, TOKENS, "sdpa")
    model.model.embed_tokens.register_forward_hook(wait)
    return model


def _samples(steps: int) -> list[dict[str, Any]]:
    """Return the samples of all steps."""
    import torch

    from benchmarks.measure.models import VOCABULARY

    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (SAMPLES * steps, TOKENS), generator=draw)
    return [{"input_ids": row, "labels": row} for row in rows]


def _optimizer(model: Any) -> Any:
    """Return the optimizer that all trainings use."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPSILON, weight_decay=0.0)


def one_process(rank: int, report: ranks.Report, steps: int) -> list[float]:
    """Return the losses of plain torch on the global batches."""
    from torch.utils.data import DataLoader

    model = _model(0.0)
    optimizer, losses = _optimizer(model), []
    for batch in DataLoader(_samples(steps), SAMPLES):  # type: ignore[arg-type]
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train(rank: int, report: ranks.Report, script: str, batch: Any, steps: int) -> dict[str, Any]:
    """Return for every step the rank's loss, its number of samples, and the time of its end."""
    import ds_hetero

    handle, model = ds_hetero.register(), _model(S_PER_SAMPLE[rank])
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // len(S_PER_SAMPLE),
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 10**6},
        "gradient_clipping": 0.0,  # where DeepSpeed has 1.0
        "zero_allow_untested_optimizer": True,
        "heterogeneity": {"batch": batch},
    }
    losses, ends = (_trainer if script == "Trainer" else _own_loop)(handle, model, config, steps)
    split = handle.plan.batch_split
    assert split is not None
    per_s = (steps - NOT_COUNTED) / (ends[-1] - ends[NOT_COUNTED - 1])
    return {"losses": losses, "steps_per_s": per_s, "batch": split.micro_batch_sizes}


def _own_loop(handle: Any, model: Any, config: dict[str, Any], steps: int) -> tuple[list[float], list[float]]:
    """Train in a custom loop; return the losses of the global batches, and the times at which steps ended."""
    import deepspeed
    import torch
    from torch.utils.data import DataLoader

    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)
    parts, ends = [], []
    for batch in handle.dataloader(DataLoader(_samples(steps), SAMPLES)):  # type: ignore[arg-type]
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        parts.append(float(loss.detach()) * len(batch["labels"]) / SAMPLES)
        ends.append(time.perf_counter())
    losses = torch.tensor(parts, dtype=torch.float64)
    torch.distributed.all_reduce(losses)
    return losses.tolist(), ends


def _trainer(handle: Any, model: Any, config: dict[str, Any], steps: int) -> tuple[list[float], list[float]]:
    """Train with the HF Trainer; return its logged losses, and the times at which steps ended."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    ends = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        """Records the time at which every step ends."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=config,
            per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
            max_steps=steps,
            learning_rate=LR,
            adam_epsilon=EPSILON,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=_samples(steps), callbacks=[Ends()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], ends


def measure(rounds: int, steps: int, report: ranks.Report) -> dict[str, Any]:
    """Return steps per second by script and batch, the largest relative difference of a loss, and the final batch."""
    expected = ranks.run(one_process, [ranks.LOOPBACK], steps)[0]
    cases = list(product(SCRIPTS, BATCHES))
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
    for done, (_, case) in enumerate(turns := list(product(range(rounds), cases))):
        report(done / len(turns), f"{case[0]}, {case[1]}")
        traces = ranks.run(train, [ranks.LOOPBACK] * len(S_PER_SAMPLE), case[0], BATCHES[case[1]], steps)[0]
        losses = zip(traces.pop("losses"), expected, strict=True)
        rows[case].append({**traces, "error": max(abs(loss - one) / abs(one) for loss, one in losses)})
    return {"cases": [{"script": script, "batches": name, "rounds": rows[script, name]} for script, name in cases]}


def show(result: dict[str, Any], console: Console) -> None:
    """Print one line for each script and batch."""
    table = Table(title=f"EMULATED speeds 3:1, bound {BOUND}x: medians (least to most of the rounds)")
    for column in ("script", "batches", "steps/s", "over equal", "a loss differs by", "batch at the end"):
        table.add_column(column)
    rates = {(row["script"], row["batches"]): [one["steps_per_s"] for one in row["rounds"]] for row in result["cases"]}
    for row in result["cases"]:
        rate = rates[row["script"], row["batches"]]
        over = median(rate) / median(rates[row["script"], "equal"])
        table.add_row(
            row["script"],
            row["batches"],
            f"{median(rate):.2f} ({min(rate):.2f} to {max(rate):.2f})",
            f"{over:.2f}x",
            f"{max(one['error'] for one in row['rounds']):.1e}",
            str(list(row["rounds"][-1]["batch"])),
        )
    console.print(table)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", action="store_true", help="on stdout, in the place of the table")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "unequal_batches.json")
    args = parser.parse_args()
    with results.progress(Console(stderr=True)) as report:
        measured = measure(1 if args.quick else args.rounds, args.steps, report)
    result = {**results.header("python -m benchmarks.unequal_batches"), "bound": BOUND, **measured}
    if args.json:
        print(json.dumps(result))
    else:
        show(result, Console())
    if not args.quick:
        results.write(result, args.out)


if __name__ == "__main__":
    main()
