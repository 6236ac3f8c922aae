"""All checks of one engine: one exchange per optimizer step, and one verdict on every rank."""

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
    """The checks of one engine's steps; the same kinds in the same order on every rank."""

    def __init__(self, checks: Iterable[StepCheck] = ()) -> None:
        self._checks: list[StepCheck] = []
        self._reported: set[str] = set()  # subjects of undecided checks that rank 0 has logged
        self.count = 0  # optimizer steps that were checked
        for check in checks:
            self.add(check)

    def add(self, check: StepCheck) -> None:
        """Let a check take part from the next step on; every rank of the world."""
        self._checks.append(check)

    def judge(self) -> None:
        """Exchange the numbers of a step that ends, before the optimizer's step. Raises what contradicts it.

        Caller: every rank of the world, once per optimizer step.
        Collectives: one `all_gather_bytes`; none without checks.

        Raises:
            HeteroError: the first contradiction; the same on every rank.
            StepError: a rank is elsewhere, such as at its next batch; on every rank.
        """
        if not self._checks:
            return
        error: Exception | None = None
        payload = b""
        try:
            payload = _on_host(self._numbers()).numpy().tobytes()
        except Exception as raised:
            error = raised
        numbers = [_OK if error is None else _ERROR]
        with waiting_for_peers("checking an optimizer step"):
            statuses, payloads = all_gather_bytes(numbers, payload if error is None else encode_failure(error))
        failures = {rank: payloads[rank] for rank, (status,) in enumerate(statuses) if status == _ERROR}
        raise_failures(failures, error, "the step could not be checked")
        rows = [torch.frombuffer(bytearray(each), dtype=torch.float64).tolist() for each in payloads]
        self.count += 1
        self._judge_rows(rows)

    def _numbers(self) -> list[Tensor]:
        """Numbers of every check, in order."""
        numbers = []
        for check in self._checks:
            of_check = check.numbers()
            parts = of_check if isinstance(of_check, tuple) and isinstance(of_check[0], Tensor) else (of_check,)
            tensors = [torch.as_tensor(part, dtype=torch.float64) for part in parts]
            assert sum(map(len, tensors)) == check.width, (type(check).__name__, check.width)
            numbers += tensors
        return numbers

    def _judge_rows(self, rows: Sequence[Sequence[float]]) -> None:
        """Let every check see its columns; raise the first contradiction."""
        start, contradiction = 0, None
        for check in self._checks:
            verdict = check.verdict([row[start : start + check.width] for row in rows])
            start += check.width
            if isinstance(verdict, Undecided):
                self._report(verdict)
            elif isinstance(verdict, HeteroError) and contradiction is None:
                contradiction = verdict
        if contradiction is not None:
            raise contradiction

    def _report(self, undecided: Undecided) -> None:
        """Log what could not be checked, once, on rank 0."""
        subject = undecided.subject or undecided.text
        if subject not in self._reported and dist.get_rank() == 0:
            logger.warning("%s", undecided.text)
        self._reported.add(subject)


def _on_host(parts: Sequence[Tensor]) -> Tensor:
    """Return all numbers in one tensor on the CPU; those on a GPU in one copy, the only wait for the device."""
    on_device = [part for part in parts if part.device.type != "cpu"]
    if not on_device:
        return torch.cat(list(parts))
    fetched = iter(torch.split(torch.cat(on_device).cpu(), [len(part) for part in on_device]))
    return torch.cat([part if part.device.type == "cpu" else next(fetched) for part in parts])
