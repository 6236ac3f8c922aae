"""Run all checks of one engine: exchange their numbers once per step, and raise the first error on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import HeteroError
from ds_hetero.runtime.collectives import all_gather_bytes, encode_failure, raise_failures
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_checks.protocol import StepCheck, Undecided

logger = logging.getLogger(__name__)

_OK, _ERROR = range(2)


class StepChecks:
    """The checks of one engine's steps; every rank has the same kinds in the same order."""

    def __init__(self, checks: Iterable[StepCheck] = ()) -> None:
        self._checks: list[StepCheck] = []
        self._reported: set[str] = set()  # subjects of undecided verdicts that rank 0 has logged
        self.count = 0  # optimizer steps checked so far
        for check in checks:
            self.add(check)

    def add(self, check: StepCheck) -> None:
        """Add a check from the next step on. Every rank of the world adds it."""
        self._checks.append(check)

    def run(self) -> None:
        """Exchange the numbers of the step that ends and check them, before the optimizer's step.

        Caller: every rank of the world, once per optimizer step.
        Collectives: one `all_gather_bytes`; none without checks.

        Raises:
            HeteroError: a check found an error; the first one, the same on every rank.
            StepError: a rank is at another point of the loop, such as its next batch; on every rank.
        """
        if not self._checks:
            return
        error: Exception | None = None
        payload = b""
        try:
            payload = _on_host(self._numbers()).numpy().tobytes()
        except Exception as raised:
            error = raised
        status = [_OK if error is None else _ERROR]
        with waiting_for_peers("checking an optimizer step"):
            statuses, payloads = all_gather_bytes(status, payload if error is None else encode_failure(error))
        failures = {rank: payloads[rank] for rank, (status,) in enumerate(statuses) if status == _ERROR}
        raise_failures(failures, error, "the step could not be checked")
        rows = [torch.frombuffer(bytearray(received), dtype=torch.float64).tolist() for received in payloads]
        self.count += 1
        self._report_verdicts(rows)

    def _numbers(self) -> list[Tensor]:
        """Return the numbers of every check, in order."""
        numbers = []
        for check in self._checks:
            of_check = check.numbers()
            has_parts = isinstance(of_check, tuple) and isinstance(of_check[0], Tensor)  # else one sequence of numbers
            parts = of_check if has_parts else (of_check,)
            tensors = [torch.as_tensor(part, dtype=torch.float64) for part in parts]
            assert sum(map(len, tensors)) == check.width, (type(check).__name__, check.width)
            numbers += tensors
        return numbers

    def _report_verdicts(self, rows: Sequence[Sequence[float]]) -> None:
        """Get the verdict of every check on its columns of the rows; log undecided ones, and raise the first error."""
        start, first_error = 0, None
        for check in self._checks:
            verdict = check.verdict([row[start : start + check.width] for row in rows])
            start += check.width
            if isinstance(verdict, Undecided):
                self._report(verdict)
            elif isinstance(verdict, HeteroError) and first_error is None:
                first_error = verdict
        if first_error is not None:
            raise first_error

    def _report(self, undecided: Undecided) -> None:
        """Log an undecided verdict on rank 0, once for each subject."""
        subject = undecided.subject or undecided.text
        if subject not in self._reported and dist.get_rank() == 0:
            logger.warning("%s", undecided.text)
        self._reported.add(subject)


def _on_host(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate all numbers on the CPU; those on a GPU come in one copy, the only wait for the device."""
    on_device = [part for part in parts if part.device.type != "cpu"]
    if not on_device:
        return torch.cat(list(parts))
    copies = iter(torch.split(torch.cat(on_device).cpu(), [len(part) for part in on_device]))
    return torch.cat([part if part.device.type == "cpu" else next(copies) for part in parts])
