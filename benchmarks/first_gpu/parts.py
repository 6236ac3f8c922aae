"""A part of the run: one function on one or several ranks, which reports rows of figures as it gets them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Row = dict[str, Any]
_COLLECTIVE_S = 600.0  # of a process group: the time-outs are those of parts, and a group's own must not come first


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a rank of a part needs to run.

    Args:
        rank: of ``ranks``; each is a process, and all are on one device.
        rehearsal: on CPUs, with the smallest sizes.
        folder: of the part, empty at its start, the same for all its ranks.
        report: takes a row; it is saved when the runner has read it.
        pretended_capability: of the GPU that a rehearsal compiles for.
    """

    rank: int
    ranks: int
    rehearsal: bool
    folder: Path
    report: Callable[[Row], None]
    pretended_capability: tuple[int, int] = (9, 0)

    def choose(self, on_gpu: T, rehearsed: T) -> T:
        """Return the value for a GPU, or that for a rehearsal."""
        return rehearsed if self.rehearsal else on_gpu

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        import torch

        return torch.device("cpu") if self.rehearsal else torch.device("cuda", 0)

    @property
    def dtype(self) -> torch.dtype:
        """Type in which attention is trained there."""
        from ds_hetero.runtime.devices import default_dtype

        return default_dtype(self.device)

    @property
    def half(self) -> torch.dtype:
        """16-bit type whose matmuls the device supports: float16 on GPUs without bfloat16; bfloat16 in a rehearsal."""
        import torch

        return torch.bfloat16 if self.rehearsal else self.dtype

    @property
    def capability(self) -> int:
        """Compute capability of the GPU: ten times the major plus the minor number."""
        import torch

        major, minor = self.pretended_capability if self.rehearsal else torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    def join(self, lazily: bool = False, name: str | None = "") -> None:
        """Make the default process group of the part's ranks.

        Args:
            lazily: let the first call make the communicator, as in scripts that give no ``device_id``.
            name: of the backend; empty for nccl, or gloo in a rehearsal; None to name none.
        """
        import torch
        import torch.distributed as dist

        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            ("nccl" if on_gpu else "gloo") if name == "" else name,
            store=dist.FileStore(str(self.folder / "store"), self.ranks),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=_COLLECTIVE_S),
            device_id=self.device if on_gpu and not lazily else None,
        )

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A function to run, and its limits.

    Args:
        name: in its section. run: a module-level function. limit_s: seconds after which its processes are ended; less
        if its section has less left. ranks: number of processes on the device. communicates: its ranks form a process
        group on the device, which some releases of NCCL refuse on one GPU. without_mps: its ranks take turns on the
        device, because one of them is killed: MPS may end its others, too. needs: names of torch that older releases
        lack, such as ``torch.distributed.all_gather_single``. env: variables of its processes; `rehearsed_env` has
        further ones of a rehearsal. strict: in a rehearsal its ranks wait like those on NCCL (`tests.strict_group`).
        in_background: it begins with its section and runs beside all later parts. outcomes: accepted besides "done":
        "timed out" if standing still is a result, "failed" if a rank dies. Both count
            only after a row: a part without a row has not reached the step that it tries.
        grace_s: seconds for the other ranks to end, once one has failed.
        rehearsed_limit_s: of a rehearsal; None for the same. `rehearsed_ranks` likewise.
        rehearsed_fresh: a rehearsal starts a new interpreter for it, because imports read its variables.
        unrehearsed: the piece of it that runs on a GPU only, while the rest is rehearsed.
        not_rehearsed: why it cannot be rehearsed; empty if it is.
    """

    name: str
    run: Callable[[Context], None]
    limit_s: float
    ranks: int = 1
    communicates: bool = True
    without_mps: bool = False
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    rehearsed_env: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    in_background: bool = False
    outcomes: tuple[str, ...] = ("done", "left out")
    grace_s: float = 5.0
    rehearsed_limit_s: float | None = None
    rehearsed_ranks: int | None = None
    rehearsed_fresh: bool = False
    unrehearsed: str = ""
    not_rehearsed: str = ""

    def of_run(self, rehearsal: bool) -> Part:
        """Return the part with the limits of this kind of run."""
        if not rehearsal:
            return self
        return replace(
            self,
            limit_s=self.limit_s if self.rehearsed_limit_s is None else self.rehearsed_limit_s,
            ranks=self.ranks if self.rehearsed_ranks is None else self.rehearsed_ranks,
        )


@dataclass(frozen=True, kw_only=True)
class Section:
    """Parts that answer one question.

    Args:
        name: as in ``--sections``.
        budget_s: seconds in a run of ten minutes; the next section gets the rest of it.
        decides: the decision that its figures are for.
    """

    name: str
    budget_s: float
    decides: str
    parts: tuple[Part, ...]


def missing_names(names: tuple[str, ...]) -> list[str]:
    """Return those of torch's ``names`` that the installed release lacks."""
    import importlib

    missing = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not hasattr(importlib.import_module(module), attribute):
            missing.append(name)
    return missing


def environment_of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables of a rank, as a launcher would set them; all ranks are on the first device."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # docs/rented-gpus.md, "Several ranks on one GPU"
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": os.environ["TRITON_CACHE_DIR"],
    }
