"""Run sections one after the other within their budgets, and record the rows that their parts report.

Budgets add up: section i has to end when the budgets of the first i sections are used, so that the next section gets
the rest of a budget. Parts in the background end at the end of the run at the latest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from benchmarks.first_gpu import mps
from benchmarks.first_gpu.crew import Crew, Outcome, Settings, wait_for
from benchmarks.first_gpu.parts import Context, Part, Row, Section, missing_names
from benchmarks.first_gpu.record import Record
from benchmarks.first_gpu.shared_card import refusal_of_installed

_TICK_S = 0.25
_MIN_PART_S = 2.0  # a part is not begun with less
_MPS_S = 15.0  # of a process that tries the device by MPS: its server starts then, within some seconds
_PROBE_S = 60.0  # the fork server imports torch, DeepSpeed and transformers first
ENV = "env"  # key of a row whose value are variables of MPS, for later parts that may run by it, once it is tried
_ONE_RANK = "one_rank"  # key of the row of `_PROBE`: why ranks cannot share the card; empty where they can


class Runner:
    """One run.

    Args:
        record: of the results.
        folder: for the parts' own files.
        budget_s: of all ``sections`` together; their own budgets are reduced if their sum is larger.
    """

    def __init__(
        self, sections: Sequence[Section], record: Record, folder: Path, settings: Settings, budget_s: float
    ) -> None:
        self._sections, self._record, self._folder, self._settings = sections, record, folder, settings
        wanted_s = sum(section.budget_s for section in sections)
        share = min(1.0, budget_s / wanted_s) if wanted_s else 1.0
        self._ends_s = list(accumulate(section.budget_s * share for section in sections))
        self._background: list[tuple[Section, Crew]] = []
        self._mps: Mapping[str, str] = {}  # variables of the daemon that a part has started
        self._one_rank = ""  # why parts of several ranks that communicate are left out
        record.result["budget_s"] = budget_s

    def run(self) -> None:
        """Run everything; started processes and MPS's daemon are ended in any case."""
        try:
            self._choose_start_method()
            began = time.monotonic()
            for section, end_s in zip(self._sections, self._ends_s, strict=True):
                for part in section.parts:
                    self._run_part(section, part, began + (self._ends_s[-1] if part.in_background else end_s))
            for section, crew in list(self._background):
                self._follow(section, crew)
        finally:
            for section, crew in list(self._background):
                self._finish(section, crew)
            mps.stop(self._mps)
            self._record.write()

    def _choose_start_method(self) -> None:
        """Fork from a server that has imported everything, unless forked processes cannot use the device."""
        if not self._is_probed("start"):
            self._settings = replace(self._settings, start_method="spawn")
            self._is_probed("start anew")
        self._record.result[_ONE_RANK] = self._one_rank
        self._record.result["start_method"] = self._settings.start_method

    def _is_probed(self, name: str) -> bool:
        """Return whether a process that is started like those of parts can use the device; record its row on NCCL."""
        crew = Crew(_PROBE, self._settings, self._folder / name, _PROBE_S)
        for row in self._await(crew):
            self._one_rank = row.get(_ONE_RANK, "")
        crew.end()
        return crew.outcome is not None and crew.outcome.name == "done"

    def _run_part(self, section: Section, part: Part, until: float) -> None:
        """Run one part until ``until`` at the latest."""
        entry = self._record.entry(section, part)
        limit_s = min(part.limit_s, until - time.monotonic())
        outcome = self._reason_to_leave_out(part, limit_s)
        if outcome is not None:
            entry["outcome"], entry["why"] = outcome
            self._record.write()
            return
        settings = replace(self._settings, env={}) if part.without_mps else self._settings
        crew = Crew(part, settings, self._folder / section.name / part.name.replace(" ", "_"), limit_s)
        entry["outcome"], entry["limit_s"] = "running", round(limit_s, 1)
        self._record.write()
        if part.in_background:
            self._background.append((section, crew))
        else:
            self._follow(section, crew)
            if self._mps and not self._settings.env:
                self._try_mps(section, part)

    def _try_mps(self, section: Section, part: Part) -> None:
        """Run later parts with MPS if a process can use the device with it; otherwise end its daemon."""
        by_mps = replace(self._settings, env=self._mps)
        crew = Crew(_PROBE, by_mps, self._folder / "by_mps", _MPS_S)
        self._await(crew)
        crew.end()
        assert crew.outcome is not None
        if crew.outcome.name == "done":
            self._settings = by_mps
            return
        mps.stop(self._mps)
        self._mps = {}
        self._record.add(section, part, {"mps": False, "why": f"no process can use the device: {crew.outcome.why}"})

    def _reason_to_leave_out(self, part: Part, limit_s: float) -> Outcome | None:
        """Return why a part cannot run; None if it can."""
        if self._settings.rehearsal and part.not_rehearsed:
            return Outcome("left out", f"not rehearsed: {part.not_rehearsed}")
        if missing := missing_names(part.needs):
            return Outcome("left out", f"this release of torch lacks {', '.join(missing)}")
        if part.communicates and part.ranks > 1 and self._one_rank:
            return Outcome("left out", self._one_rank)
        if limit_s < min(_MIN_PART_S, part.limit_s):
            return Outcome("left out", "no time left")
        return None

    def _follow(self, section: Section, crew: Crew) -> None:
        """Receive rows until a part is over and its processes, with those that they started, have ended."""
        self._await(crew, section)
        self._finish(section, crew)

    def _await(self, crew: Crew, section: Section | None = None) -> list[Row]:
        """Receive rows of a part, and of those in the background, until it is over or has reached its limit.

        Returns its rows if it belongs to no section; others are recorded.
        """
        rows: list[Row] = []
        section_of = {id(other): its for its, other in self._background}
        while crew.outcome is None and time.monotonic() < crew.deadline:
            others = [other for _, other in self._background if other is not crew]
            until = min(crew.deadline, time.monotonic() + _TICK_S)
            for of, connection in wait_for([crew, *others], until):
                row = of.receive(connection)
                its = section_of.get(id(of), section)
                if row is not None and its is not None:
                    self._keep(its, of.part, row)
                elif row is not None:
                    rows.append(row)
            for other in others:
                if other.outcome is not None or time.monotonic() > other.deadline:
                    self._finish(section_of[id(other)], other)
        return rows

    def _keep(self, section: Section, part: Part, row: dict[str, object]) -> None:
        self._record.add(section, part, row)
        variables = row.get(ENV)
        if isinstance(variables, Mapping):
            self._mps = variables

    def _finish(self, section: Section, crew: Crew) -> None:
        """Record how a part ended."""
        self._background = [each for each in self._background if each[1] is not crew]
        crew.end()
        entry = self._record.entry(section, crew.part)
        assert crew.outcome is not None
        entry["outcome"], why = crew.outcome
        entry["seconds"] = round(crew.seconds, 1)
        entry["ended_s"] = {str(rank): round(seconds, 2) for rank, seconds in sorted(crew.ended_s.items())}
        if why:
            entry["why"] = why
            entry["outputs"] = crew.outputs()
        self._record.write()


def _use_device(context: Context) -> None:
    """Compute on the device; it fails in a process that was forked from one that had called CUDA."""
    import torch

    torch.ones(2, device=context.device).sum().item()
    context.report({_ONE_RANK: "" if context.rehearsal else refusal_of_installed()})


_PROBE = Part(name="start", run=_use_device, limit_s=_PROBE_S)
