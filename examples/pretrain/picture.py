"""Draw the losses of runs over their steps into one picture, and print the last of each.

    python examples/pretrain/picture.py runs/pretrain/*/ --out runs/pretrain/losses.png

A run is a folder with losses.jsonl. Lines are training losses, points are evaluations on the rows held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

import history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, each with losses.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="file of the picture")
    args = parser.parse_args()

    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for number, run in enumerate(args.runs):
        numbers = history.read(run)
        color = f"C{number}"
        _draw(axes, numbers["loss"], color=color, alpha=0.5, label=f"{run.name}, training")
        _draw(axes, numbers["eval_loss"], color=color, marker="o", label=f"{run.name}, evaluation")
        print(f"{run.name}: {_summary(numbers)}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.out, dpi=150)
    print(f"losses drawn to {args.out}")


def _draw(axes: plt.Axes, by_step: dict[int, float], **style: object) -> None:
    steps = sorted(by_step)
    axes.plot(steps, [by_step[step] for step in steps], **style)


def _summary(numbers: dict[str, dict[int, float]]) -> str:
    last, last_evaluated = max(numbers["loss"]), max(numbers["eval_loss"])
    return (
        f"step {last}, {numbers['tokens'][last]:,} tokens, {numbers['seconds'][last] / 60:.1f} min, "
        f"loss {numbers['loss'][last]:.4f}, evaluation loss {numbers['eval_loss'][last_evaluated]:.4f}"
    )


if __name__ == "__main__":
    main()
