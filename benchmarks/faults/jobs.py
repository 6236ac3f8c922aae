"""The jobs: which fault strikes which rank in which phase, with which ZeRO stage, number of ranks and loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Signals, of which "pause" is SIGSTOP and SIGCONT; errors; the file system.
KILL, TERMINATE, EXCEPTION, MEMORY = "kill -9", "SIGTERM", "exception", "MemoryError"
PAUSE, STOP = "pause", "stop for good"
NOT_REGISTERED = "no register()"
FULL, READ_ONLY = "disk full", "read-only"

_SEQUENCE_START_PHASES = ("model", "agreement", "describe", "cache", "profile", "links", "plan")
_PIPELINE_START_PHASES = ("model", "agreement", "build")
START = (*_SEQUENCE_START_PHASES, "build")
TRAINING = ("data set", "collator", "forward", "backward", "step", "between steps", "look", "save")
LOCAL = ("continue", "break", "caught exception", "stop of one rank")
"""What one rank decides alone and the others do not learn of."""

MISMATCHES = {
    "another stage": "zero_optimization.stage",
    "accumulation": "gradient_accumulation_steps",
    "clipping": "gradient_clipping",
    "bucket": "reduce_bucket_size",
    "no section": "heterogeneity",
    "switched off": "heterogeneity",
    "another schedule": "heterogeneity",
    "another model": "model",
    NOT_REGISTERED: "register",
}
"""What the victim has differently from the other ranks, and what a message must name."""

GENERATE = "generate of one rank"
FOREIGN = ("all_reduce and all_gather", "barrier and broadcast", "subgroup and world", GENERATE)
"""Collectives of the script that never meet: what the ranks call, half of them the one, half the other."""

ENDLESS = (STOP, NOT_REGISTERED)
"""After these the victim does not end by itself."""

TORCHRUN = ("torchrun static", "torchrun c10d")
"""Where torchrun restarts the job: which rendezvous it has."""

_PHASES_WITHOUT_STORE = ("describe", "data set", "forward", "backward", "step", "between steps", "save")
_ONLY_RANK_0 = ("cache", "plan")
_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run and its fault.

    Args:
        fault: kind of the fault. phase: what the victim does at that moment. stage: of ZeRO. ranks: number of ranks.
        loop: "loop" for a custom loop, or "Trainer". victim: rank that the fault strikes. store: process with torch's
        key-value store: "rank 0", as under DeepSpeed's launcher; "launcher", as under torchrun;
            or one of `TORCHRUN`, which has the store and restarts the job.
        weighted: whether ZeRO's shards are unequal.
        pipelines: whether the model is divided into stages of pipelines instead of over the sequence.
        strikes: how often the fault strikes, once per start of the job.
    """

    fault: str
    phase: str
    stage: int
    ranks: int
    loop: str
    victim: int
    store: str
    weighted: bool
    pipelines: bool = False
    strikes: int = 1

    @property
    def is_restarted(self) -> bool:
        """Whether torchrun restarts the job after a fault."""
        return self.store in TORCHRUN

    @property
    def takes_timeout(self) -> bool:
        """Whether the others can notice the fault only by the process group's timeout.

        Before deepspeed.initialize no rank knows of the others.
        """
        return self.fault in ENDLESS or (self.phase == "model" and self.fault != PAUSE)

    @property
    def keeps_store(self) -> bool:
        """Whether the victim keeps the store by which the others would learn of the fault."""
        return self.store == "rank 0" and self.victim == 0

    @property
    def name(self) -> str:
        """Name in one line, for ``--only`` and the progress bar."""
        zero = f"ZeRO-{self.stage}{' weighted' if self.weighted else ''}"
        loop = f"{self.loop}{' with pipelines' if self.pipelines else ''}"
        rank = f"rank {self.victim} of {self.ranks}"
        twice = " twice" if self.strikes > 1 else ""
        return f"{self.fault}{twice} in {self.phase}, {rank}, {zero}, {loop}, store on {self.store}"


def all_jobs() -> list[Job]:
    """Return every fault in every phase that it can strike, over all stages; other circumstances take turns."""
    jobs = [_job(number, *case) for number, case in enumerate(_cases())]
    jobs += [_job_of_pipelines(number, *case) for number, case in enumerate(_cases_of_pipelines())]
    jobs += [_job_without_store(number, phase) for number, phase in enumerate(_PHASES_WITHOUT_STORE)]
    jobs += [_job_of_foreign_collectives(number, *case) for number, case in enumerate(_foreign_cases())]
    return jobs + [_restarted_job(number, *case) for number, case in enumerate(_RESTARTED)]


def quick_jobs() -> list[Job]:
    """Return one job per phase and per kind of fault, as few as possible; and one per phase of pipelines."""
    seen_features: set[str] = set()
    chosen = []
    for rounds in (lambda job: {job.phase, job.fault}, lambda job: {job.fault}, lambda job: {job.phase}):
        for job in all_jobs():
            if job.is_restarted:
                continue
            news = rounds(job) - seen_features
            if len(news) == len(rounds(job)):
                chosen.append(job)
                seen_features |= news
    of_pipelines = {job.phase: job for job in reversed(all_jobs()) if job.pipelines and job.fault not in LOCAL}
    without_store = [job for job in all_jobs() if job.keeps_store and job.fault == STOP and job.phase == "step"]
    restarted = [job for job in all_jobs() if job.is_restarted and job.strikes > 1][:1]
    return list(dict.fromkeys([*chosen, *of_pipelines.values(), *without_store, *restarted]))


_RESTARTED = (
    *(("data set", 1), ("collator", 1), ("forward", 2), ("backward", 1), ("step", 1), ("between steps", 2)),
    *(("save", 1), ("model", 1), ("agreement", 1), ("plan", 2)),
    *(("forward", 1), ("backward", 2), ("step", 2), ("save", 1), ("between steps", 1), ("data set", 2)),
    *(("model", 2), ("save", 1), ("step", 2), ("forward", 1)),
)
"""Phase, and how often the fault strikes there."""


def _foreign_cases() -> Iterator[tuple[str, int, int]]:
    """Yield fault, stage and number of ranks of unmatched collectives."""
    for number, fault in enumerate(FOREIGN):
        if fault == GENERATE:
            yield fault, 3, 2
            yield fault, 3, 4
        else:
            yield fault, number % _STAGES, 2
            yield fault, number + 2 & 3, 4


def _cases() -> Iterator[tuple[str, str, int]]:
    """Yield fault, phase and stage."""
    for phase in TRAINING:
        for stage in range(_STAGES):
            yield KILL, phase, stage
        for stage in range(_STAGES):
            yield MEMORY if phase in ("forward", "backward") and stage % 2 else EXCEPTION, phase, stage
        for stage in (1, 3):
            yield TERMINATE, phase, stage
            yield PAUSE, phase, stage + 1 & 3
        yield STOP, phase, 2
    for phase in _SEQUENCE_START_PHASES:
        for fault, stage in ((KILL, 1), (EXCEPTION, 2), (KILL, 3), (TERMINATE, 0), (PAUSE, 1), (STOP, 3)):
            yield fault, phase, stage
    for stage in range(_STAGES):
        for fault in (FULL, READ_ONLY):
            yield fault, "save", stage
            yield fault, "save", stage
        for fault in LOCAL:
            yield fault, "between steps", stage
    for number, fault in enumerate(MISMATCHES):
        yield fault, "agreement", number % _STAGES
        yield fault, "agreement", (number + 1) % _STAGES


def _cases_of_pipelines() -> Iterator[tuple[str, str, int]]:
    """Yield fault, phase and stage of jobs with pipelines."""
    rarely = (TERMINATE, PAUSE, STOP)
    for number, phase in enumerate((*_PIPELINE_START_PHASES, *TRAINING)):
        if phase != "look":
            yield KILL, phase, number % 3
            yield EXCEPTION, phase, (number + 1) % 3
            yield rarely[number % 3], phase, (number + 2) % 3
    for stage, fault in ((1, FULL), (2, READ_ONLY)):
        yield fault, "save", stage
    for fault in LOCAL:
        yield fault, "between steps", 1
    yield "another schedule", "agreement", 1


def _job(number: int, fault: str, phase: str, stage: int) -> Job:
    """Return the job of a case; its circumstances depend on its number."""
    ranks = 4 if number % 3 == 2 else 2
    loop = "Trainer" if number % 5 in (1, 3) else "loop"
    if fault in LOCAL:
        loop = "Trainer" if fault == "stop of one rank" else "loop"
    only_rank_0 = phase in _ONLY_RANK_0 or (phase == "save" and stage == 0)  # the others have nothing to do
    victim = 0 if only_rank_0 else number // 2 % ranks
    if fault in MISMATCHES:
        victim = ranks - 1
    return Job(
        fault=fault,
        phase=phase,
        stage=stage,
        ranks=ranks,
        loop=loop,
        victim=victim,
        store="launcher" if number % 4 < 2 else "rank 0",
        weighted=stage > 0 and number % 2 == 0,
    )


def _job_of_pipelines(number: int, fault: str, phase: str, stage: int) -> Job:
    """Return the job of a case with pipelines; its circumstances depend on its number."""
    ranks = 2 if number % 3 == 2 else 4
    loop = "Trainer" if number % 4 == 3 else "loop"
    if fault in LOCAL:
        loop = "Trainer" if fault == "stop of one rank" else "loop"
    return Job(
        fault=fault,
        phase=phase,
        stage=stage,
        ranks=ranks,
        loop=loop,
        victim=ranks - 1 if fault in MISMATCHES else number % ranks,
        store="launcher" if number % 4 < 2 else "rank 0",
        weighted=False,
        pipelines=True,
    )


def _job_without_store(number: int, phase: str) -> Job:
    """Return a job in which rank 0, which keeps the store, is stopped."""
    return Job(
        fault=STOP,
        phase=phase,
        stage=(1, 2, 3, 0)[number % _STAGES],
        ranks=2 if number % 3 else 4,
        loop="Trainer" if number % 4 == 2 else "loop",
        victim=0,
        store="rank 0",
        weighted=False,
    )


def _job_of_foreign_collectives(number: int, fault: str, stage: int, ranks: int) -> Job:
    """Return a job with unmatched collectives; its circumstances depend on its number."""
    return Job(
        fault=fault,
        phase="between steps",
        stage=stage,
        ranks=ranks,
        loop="Trainer" if fault == GENERATE else "loop",
        victim=0 if fault == GENERATE else 1,
        store="launcher" if number % 4 < 2 else "rank 0",
        weighted=False,
    )


def _restarted_job(number: int, phase: str, strikes: int) -> Job:
    """Return a job that torchrun restarts; its circumstances depend on its number."""
    only_rank_0 = phase in _ONLY_RANK_0 or (phase == "save" and number % _STAGES == 0)
    return Job(
        fault=EXCEPTION if number % 3 == 2 else KILL,
        phase=phase,
        stage=number % _STAGES,
        ranks=2,
        loop="Trainer" if number % 5 in (1, 3) else "loop",
        victim=0 if only_rank_0 else number // 2 % 2,
        store=TORCHRUN[number // 2 % 2 ^ number % 2],
        weighted=number % _STAGES > 0 and number % 3 == 0,
        strikes=strikes,
    )
