"""What a run printed, as lines of losses.jsonl: one of every few steps, one of every evaluation.

    {"step": 100, "loss": 4.31, "learning_rate": 0.0019, "grad_norm": 0.8, "tokens": 102400, "seconds": 81.2}
    {"step": 100, "eval_loss": 4.43}

A run that resumes appends, and repeats the steps since its checkpoint: of two lines of a step the later counts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

FILE = "losses.jsonl"


class History:
    """Writer of the lines; ``is_writer`` on rank 0 alone, other ranks write and print nothing."""

    def __init__(self, folder: Path, *, is_writer: bool, row_tokens: int) -> None:
        self._path = folder / FILE
        self._is_writer = is_writer
        self._row_tokens = row_tokens
        self._begin = time.perf_counter()

    def begin(self, step: int) -> None:
        """Begin with the steps after ``step``; a run from the beginning deletes the lines of an earlier one."""
        self._begin = time.perf_counter()
        if self._is_writer:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if step == 0:
                self._path.unlink(missing_ok=True)

    def step(self, step: int, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Note a step, with the mean loss since the one noted before."""
        seconds = time.perf_counter() - self._begin
        tokens = step * self._row_tokens
        self._write(
            step=step, loss=loss, learning_rate=learning_rate, grad_norm=grad_norm, tokens=tokens, seconds=seconds
        )
        numbers = f"loss {loss:.4f}, gradient norm {grad_norm:.4f}, learning rate {learning_rate:.2e}"
        self.say(f"step {step}: {numbers}, {seconds:.0f} s")

    def evaluation(self, step: int, loss: float) -> None:
        """Note an evaluation."""
        self._write(step=step, eval_loss=loss)
        self.say(f"step {step}: evaluation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self._is_writer:
            print(text, flush=True)

    def _write(self, **line: Any) -> None:
        if self._is_writer:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


class MeanLoss:
    """Mean of the losses since it was taken last; its state is saved with the rest of a job."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def add(self, loss: float) -> None:
        """Note the loss of a step."""
        self._losses.append(loss)

    def take(self) -> float:
        """Return the mean, and begin anew."""
        mean = sum(self._losses) / len(self._losses)
        self._losses = []
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the mean."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the mean that `state_dict` returned."""
        self._losses = list(state["losses"])


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Return numbers by step of a run: of "loss", "eval_loss", "learning_rate", "seconds" and the others."""
    numbers: dict[str, dict[int, float]] = {}
    for text in (folder / FILE).read_text().splitlines():
        line = json.loads(text)
        step = line.pop("step")
        for name, value in line.items():
            numbers.setdefault(name, {})[step] = value
    return numbers
