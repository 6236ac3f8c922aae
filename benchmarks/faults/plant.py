"""Plant faults from the outside: the product's code is unchanged, and one rank is struck in one phase.

A fault is in the code that users bring (data set, collator, layers, optimizer, loop), or in front of a function of the
product that is named here. Its time is written down before it happens; the time to the end of the job counts from it.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.faults.jobs import START, Job

FAULT_FILE = "fault"
FAULT_STEP = 4
_NOBODY = 65534  # the user id without any rights

_FUNCTIONS = {
    "agreement": "ds_hetero.engine.same_configuration:expect_section_name",
    "describe": "ds_hetero.frameworks.transformers.adapter:read_model_facts",
    "cache": "ds_hetero.profiler.cache:read_profile",
    "profile": "ds_hetero.profiler.measure:memory_probe",
    "links": "ds_hetero.profiler.measure:pair_round",
    "plan": "ds_hetero.job.start:decide",
    "build": "ds_hetero.frameworks.deepspeed.pipeline.engine:make_boundary_groups",
    "look": "ds_hetero.job.replanning:Replanning.observe",
}
"""By phase, the function of the product in front of which the fault strikes."""


class Planted(RuntimeError):
    """The exception that a fault raises."""


class Plant:
    """The fault of one job, on one of its ranks.

    Args:
        job: with its fault.
        rank: of this process.
        folder: of the job; the time of the fault is written into it.

    Attributes:
        step: the optimizer step that runs now, counted from 1; set by the training loop.
    """

    def __init__(self, job: Job, rank: int, folder: Path) -> None:
        self.step = 0
        self._job, self._folder = job, folder
        self._start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._is_victim, self._struck = rank == job.victim and self._start < job.strikes, False

    def is_due(self, phase: str) -> bool:
        """Return whether the fault strikes this rank now, in ``phase``."""
        in_time = phase in START or self.step == FAULT_STEP + self._start
        return self._is_victim and not self._struck and self._job.phase == phase and in_time

    def strike(self, phase: str) -> None:
        """Strike this rank with the job's fault, once, if it is due."""
        if self.is_due(phase):
            self.note()
            _strike(self._job.fault)

    def note(self) -> None:
        """Write down that the fault happens now."""
        self._struck = True
        draft = self._folder / f"{FAULT_FILE}.new"
        draft.write_text(repr(time.monotonic()))
        draft.rename(self._folder / FAULT_FILE)

    def in_functions(self) -> None:
        """Put the fault in front of the product's function of the phase, if there is one."""
        if self._is_victim and self._job.phase in _FUNCTIONS:
            module, _, path = _FUNCTIONS[self._job.phase].partition(":")
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, name, self._struck_before(self._job.phase, getattr(owner, name)))

    def in_model(self, layers: Iterable[torch.nn.Module]) -> None:
        """Plant faults in forward and backward of layers, and in the step of any optimizer."""

        def hook_gradient(module: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self.strike("backward"))

        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self.strike("forward"))
            layer.register_forward_hook(hook_gradient)
        register_optimizer_step_pre_hook(lambda *_: self.strike("step"))  # the Trainer makes one of its own

    def in_saving(self) -> None:
        """Plant faults in writing the files of a checkpoint."""
        torch.save = self._torn(torch.save)

    def before_saving(self) -> None:
        """Take the right to write into the checkpoint's folder from this rank, if that is the fault."""
        if self._job.fault == "read-only" and self.is_due("save"):
            self.note()
            os.seteuid(_NOBODY)

    def _struck_before(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def struck(*args: Any, **kwargs: Any) -> Any:
            self.strike(phase)
            return function(*args, **kwargs)

        return struck

    def _torn(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Write half of a file, or nothing if the disk is full."""

        @functools.wraps(save)
        def torn(content: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_due("save") and self._job.fault == "disk full":
                self.note()
                if isinstance(file, (str, os.PathLike)):
                    return save(content, "/dev/full", *args, **kwargs)
                with open("/dev/full", "wb") as full:
                    return save(content, full, *args, **kwargs)
            if self.is_due("save"):
                save(content, file, *args, **kwargs)
                if isinstance(file, (str, os.PathLike)):
                    os.truncate(file, os.path.getsize(file) // 2)
                self.strike("save")
                if not isinstance(file, (str, os.PathLike)):
                    return None
            return save(content, file, *args, **kwargs)

        return torn


def _strike(fault: str) -> None:
    signals = {
        "kill -9": signal.SIGKILL,
        "SIGTERM": signal.SIGTERM,
        "pause": signal.SIGSTOP,
        "stop for good": signal.SIGSTOP,
    }
    if fault in signals:
        os.kill(os.getpid(), signals[fault])
    elif fault == "MemoryError":
        raise MemoryError("planted")
    elif fault in ("exception", "caught exception"):
        raise Planted("a planted fault")
