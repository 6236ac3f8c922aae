"""Judge how a job ended: its end, the ranks that messages name, last words, and whether the last checkpoint loads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isclose
from pathlib import Path

import ds_hetero.errors
from benchmarks.faults.jobs import ENDLESS, FOREIGN, LOCAL, MISMATCHES, PAUSE, Job
from benchmarks.faults.plant import FAULT_FILE
from benchmarks.faults.training import STEPS, TIMEOUT_S, losses_by_step, recorded_losses
from benchmarks.faults.world import RankEnd

_ERROR = re.compile(r"^(?:[\w]+\.)*(\w*(?:Error|Exception|Planted|Interrupt|Exit|Warning))(?::|$)")
_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and )\d+)*)")
_BACKEND = re.compile(
    r"gloo|nccl|c10d|TCPStore|ProcessGroup|closed by peer|reset by peer|broken pipe|timed out|timeout|socket|"
    r"unexpected pos|PytorchStreamWriter|terminate called|Aborted|Segmentation",
    re.IGNORECASE,
)
_LOG_LINE = re.compile(r"^\[?[WE]\d{4} |^terminate called|^\s*what\(\)|^(Aborted|Segmentation fault)")
_CPP_TEXT = re.compile(r"\w\.(?:cc|cpp|h|hpp):\d+|\benforce fail\b|(?:closed|reset) by peer|what\(\):", re.IGNORECASE)
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # of torch's excepthook
_RTOL_LOSS = 1e-5


@dataclass
class Verdict:
    """Verdict on one job.

    Args:
        job: the job.
        seconds: from the fault to the end of the last rank, minus the duration of the fault itself; None if it hung or
            continued.
        named: "right", "wrong", "nobody", or "-" if no rank is at fault.
        checkpoint: "loads", "none yet", "bad", or "-" if it was not tried; "resumed" for a job that torchrun has
            restarted.
        problems: in sentences.
        last_words: of each rank.
    """

    job: Job
    seconds: float | None
    named: str = "-"
    checkpoint: str = "-"
    hung: list[int] = field(default_factory=list)
    raw: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    last_words: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def judge(job: Job, folder: Path, ends: Sequence[RankEnd]) -> Verdict:
    """Judge a job by the ends of its ranks, without its checkpoint; see `judge_checkpoint`."""
    verdict = Verdict(job, None, last_words=[last_word(end.output) for end in ends])
    stopped = {job.victim} if job.fault in ENDLESS else set()
    verdict.hung = [rank for rank, end in enumerate(ends) if end.exit_code is None and rank not in stopped]
    if not (folder / FAULT_FILE).exists():
        verdict.problems.append("the fault did not happen")
        return verdict
    fault_s = float((folder / FAULT_FILE).read_text())
    if verdict.hung:
        verdict.problems.append(f"hang of ranks {verdict.hung}")
    else:
        ended_s = max(end.ended_at_s for rank, end in enumerate(ends) if rank not in stopped)
        took_s = ended_s - fault_s
        verdict.seconds = took_s - TIMEOUT_S if job.takes_timeout and took_s >= TIMEOUT_S else took_s
    if job.fault == PAUSE:
        verdict.seconds = None  # it goes on to its end
        _expect_completed(verdict, ends, folder)
    else:
        _judge_words(verdict, ends)
    return verdict


def judge_checkpoint(verdict: Verdict, folder: Path, ends: Sequence[RankEnd] | None) -> None:
    """Judge the training that continued from the last checkpoint.

    Args:
        verdict: on the job; completed here.
        folder: of the job.
        ends: of the ranks that continued; None if there was no checkpoint.
    """
    if ends is None:
        verdict.checkpoint = "none yet"
        return
    verdict.checkpoint = "bad"
    if codes := [end.exit_code for end in ends if end.exit_code != 0]:
        words = next((word for word in (last_word(end.output) for end in ends) if word), "")
        verdict.problems.append(f"the last checkpoint does not load: exit codes {codes}, {words}")
        return
    ranks = range(verdict.job.ranks)
    before = {step: loss for rank in ranks for step, loss in losses_by_step(folder, rank, resumed=False).items()}
    after = {step: loss for rank in ranks for step, loss in losses_by_step(folder, rank, resumed=True).items()}
    off = {step: (before[step], after[step]) for step in before.keys() & after.keys()
           if not isclose(before[step], after[step], rel_tol=_RTOL_LOSS)}  # fmt: skip
    if off:
        verdict.problems.append(f"training goes on from the last checkpoint with other losses: {off}")
        return
    verdict.checkpoint = "loads"


def judge_restarts(job: Job, folder: Path, ends: Sequence[RankEnd], undisturbed: Path) -> Verdict:
    """Judge a job that torchrun restarts: it must continue from the last checkpoint, with undisturbed losses.

    Args:
        job: the job.
        folder: of the job.
        ends: of its ranks, in all of its starts.
        undisturbed: folder of the same job without a fault.
    """
    verdict = Verdict(job, None, checkpoint="bad", last_words=[last_word(end.output) for end in ends])
    if not (folder / FAULT_FILE).exists():
        verdict.problems.append("the fault did not happen")
        return verdict
    survivors = {rank: word for rank, word in enumerate(verdict.last_words) if rank != job.victim and _is_ours(word)}
    order = ("wrong", "nobody", "right", "-")  # mostly torchrun ends the survivors before they can say a word
    verdict.named = min((_named(word, rank, job) for rank, word in survivors.items()), key=order.index, default="-")
    if verdict.named in ("wrong", "nobody"):
        verdict.problems.append(f"{verdict.named} named")
    if any(end.exit_code is None for end in ends):
        verdict.hung = list(range(job.ranks))
        verdict.problems.append("hang")
        return verdict
    expected = losses_by_step(undisturbed, 0, resumed=False)
    resumed = recorded_losses(folder, 0, resumed=True)
    starts = [(saved, step) for (saved, loss), (step, next_loss) in pairwise(resumed) if loss is None is not next_loss]
    if ends[0].exit_code or not starts or resumed[-1][0] != STEPS or any(step != saved + 1 for saved, step in starts):
        verdict.problems.append(f"exit code {ends[0].exit_code}; saved step, and the first after it: {starts}")
        return verdict
    losses = [(step, loss) for step, loss in recorded_losses(folder, 0, resumed=False) + resumed if loss is not None]
    if off := {
        step: (expected[step], loss) for step, loss in losses if not isclose(expected[step], loss, rel_tol=_RTOL_LOSS)
    }:
        verdict.problems.append(f"other losses than those of an undisturbed run: {off}")
        return verdict
    verdict.checkpoint = "resumed"
    return verdict


def last_word(output: str) -> str:
    """Return the last error in a rank's output with its message; without an error, the last line."""
    lines = [_PREFIX.sub("", line) for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    if _LOG_LINE.match(lines[-1]):
        return lines[-1]
    starts = [i for i, line in enumerate(lines) if _ERROR.match(line)]
    return "\n".join(lines[starts[-1] :]) if starts else lines[-1]


def _expect_completed(verdict: Verdict, ends: Sequence[RankEnd], folder: Path) -> None:
    codes = [end.exit_code for end in ends]
    steps = [len(losses_by_step(folder, rank, resumed=False)) for rank in range(verdict.job.ranks)]
    if any(codes) or max(steps) < STEPS:
        verdict.problems.append(f"the job did not go on: exit codes {codes}, steps {steps}")


def _judge_words(verdict: Verdict, ends: Sequence[RankEnd]) -> None:
    """Require that every survivor fails, and that the printed messages name the victim and no other rank.

    One rank, which may be the victim, prints a refusal that is the same on all ranks.
    """
    job = verdict.job
    alive = [rank for rank in range(job.ranks) if ends[rank].exit_code is not None]
    words = {rank: word for rank in alive if _ERROR.match(word := verdict.last_words[rank]) or _is_raw(word)}
    judged = [rank for rank in words if rank != job.victim] or [rank for rank in words if _is_ours(words[rank])]
    for rank in alive:
        if ends[rank].exit_code == 0:
            verdict.problems.append(f"rank {rank} exits with code 0 although a rank failed")
        if rank != job.victim and ((ends[rank].exit_code or 0) < 0 or _is_raw(verdict.last_words[rank])):
            verdict.raw.append(rank)
    order = ("wrong", "nobody", "right")
    verdict.named = min((_named(words[rank], rank, job) for rank in judged), key=order.index, default="nobody")
    if verdict.raw:
        verdict.problems.append(f"raw text ends the output of ranks {verdict.raw}")
    if verdict.named != "right":
        verdict.problems.append(f"{verdict.named} named")


def _is_ours(word: str) -> bool:
    match = _ERROR.match(word)
    return match is not None and hasattr(ds_hetero.errors, match[1])


def _is_raw(word: str) -> bool:
    """Return whether a message is a backend's own.

    Our errors may say "timed out" or "gloo", but not show C++'s text.
    """
    if "Planted" in word:
        return False
    lines = word.splitlines()
    return any(_LOG_LINE.match(line) or _CPP_TEXT.search(line) for line in lines) or (
        not _is_ours(word) and bool(_BACKEND.search(word))
    )


def _named(word: str, rank: int, job: Job) -> str:
    """Return the ranks that a survivor's last word names, without its own rank."""
    mentioned = {int(number) for numbers in _RANKS.findall(word) for number in re.findall(r"\d+", numbers)}
    if job.fault in (*MISMATCHES, *LOCAL, *FOREIGN):  # what every rank has or did is listed
        return "right" if job.victim in mentioned else "nobody"
    accused = mentioned - ({rank} if rank != job.victim else set())
    if not accused:
        return "nobody"
    return "right" if accused == {job.victim} else "wrong"
