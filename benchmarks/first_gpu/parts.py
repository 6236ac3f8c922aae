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
    """What a rank of a part is told.

    Args:
        rank: of ``ranks``; each is a process, and all are on one device.
        rehearsal: on CPUs, with the smallest sizes.
        folder: of the part, empty at its start, the same for all its ranks.
        report: takes a row; it is on disk when the runner has read it.
        pretended_capability: of the GPU that a rehearsal compiles for.
    """

    rank: int
    ranks: int
    rehearsal: bool
    folder: Path
    report: Callable[[Row], None]
    pretended_capability: tuple[int, int] = (9, 0)

    def choose(self, on_gpu: T, rehearsed: T) -> T:
        """The size, or whatever else it is, of this run."""
        return rehearsed if self.rehearsal else on_gpu

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        import torch

        return torch.device("cpu") if self.rehearsal else torch.device("cuda", 0)

    @property
    def dtype(self) -> torch.dtype:
        """What attention is trained in there."""
        from ds_hetero.runtime.devices import default_dtype

        return default_dtype(self.device)

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type that the device multiplies: float16 where it has no bfloat16; bfloat16 in a rehearsal."""
        import torch

        return torch.bfloat16 if self.rehearsal else self.dtype

    @property
    def capability(self) -> int:
        """Of the GPU: ten times the major and the minor number."""
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
    """What is run, and within which limits.

    Args:
        name: in its section.
        run: a module-level function.
        limit_s: seconds, after which its processes are ended; less where its section has less left.
        ranks: processes on the device.
        communicates: its ranks form a process group on the device, which an NCCL may refuse them on one card.
        without_mps: its ranks take turns on the device, since one of them is killed: MPS may end its others with it.
        needs: names of torch that older releases lack, such as ``torch.distributed.all_gather_single``.
        env: variables of its processes; `rehearsed_env` has those of a rehearsal beside them.
        strict: in a rehearsal its ranks wait where those on NCCL would (`tests.strict_group`).
        in_background: it begins with its section and runs beside all that follows.
        outcomes: no fault of the run: "timed out" where standing still is a result, "failed" where a rank dies. Both
            count only after a row: a part that has reported nothing has not come to what it tries.
        grace_s: for the other ranks to end, once one has failed.
        rehearsed_limit_s: of a rehearsal; None for the same. `rehearsed_ranks` likewise.
        rehearsed_fresh: a rehearsal starts a new interpreter for it, since imports read its variables.
        unrehearsed: what of it runs on a GPU alone, where the rest is rehearsed.
        not_rehearsed: why it cannot be rehearsed; empty where it is.
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
        """The part as this kind of run has it."""
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
        name: as ``--sections`` has it.
        budget_s: seconds of a run of ten minutes; what a section leaves is the next one's.
        decides: what its figures are for.
    """

    name: str
    budget_s: float
    decides: str
    parts: tuple[Part, ...]


def missing_names(names: tuple[str, ...]) -> list[str]:
    """Those of torch's ``names`` that the installed release lacks."""
    import importlib

    missing = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not hasattr(importlib.import_module(module), attribute):
            missing.append(name)
    return missing


def environment_of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Variables of a rank, as a launcher would set them; all ranks are on the first device."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # docs/selftest.md, "Several ranks on one card"
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": os.environ["TRITON_CACHE_DIR"],
    }
