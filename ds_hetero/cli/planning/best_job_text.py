"""Text of the best job for a terminal of 80 columns: at most 25 lines, or with all details."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cli.planning.job_headline import headline, speed_text
from ds_hetero.cli.printing import (
    aligned_rows,
    prediction_lines,
    print_lines,
    print_table,
    rank_ranges,
    wrapped,
)
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.planner.expert_choice import other_experts, other_experts_text
from ds_hetero.planner.fewer_ranks import MIN_ADVICE_GAIN
from ds_hetero.planner.jobs.batch import PlannedBatch
from ds_hetero.planner.jobs.job import FoundJobs, Job
from ds_hetero.planner.jobs.kinds import KINDS, ONE
from ds_hetero.planner.jobs.titles import job_title
from ds_hetero.planner.results.pipelines import PlannedPipelines
from ds_hetero.planner.results.schedule import PlannedSchedule
from ds_hetero.planner.results.sentences import slower_text
from ds_hetero.reporting.assumptions import assumed_line, network_assumptions

MAX_ANSWER_LINES = 25
_LEAST_ROWS = 3  # rows of the table of GPUs that are shown, however long the rest is


def job_lines(scenario: Scenario, job_scenario: Scenario, found: FoundJobs, price_lines: Sequence[str]) -> list[str]:
    """Return the lines on the best job and the others, at most `MAX_ANSWER_LINES`.

    Args:
        scenario: with all GPUs.
        job_scenario: with the GPUs and settings of the best job.
        price_lines: duration, energy and price of the whole training.
    """
    job = found.best
    head = [
        *wrapped("best job:", job_title(job)),
        *wrapped("", _training_text(scenario, job)),
        *wrapped("settings:", ", ".join(job.settings)),
        *wrapped("speed:", speed_text(job)),
        *wrapped("limit:", job.limit),
        *_expert_lines(job_scenario, job),
    ]
    for line in price_lines:
        label, _, text = line.partition(":")
        if label == "training":
            text = "".join(text.partition("(MFU)")[:2])  # without the power, which belongs to the energy
        if label != "energy":
            head += wrapped(f"{label}:", text.strip())
    tail = ["others:"] if len(found.jobs) + len(found.refused) > 1 else []
    for text in _other_texts(scenario, found):
        tail += wrapped("", text, indent=2)
    if assumed := [*scenario.assumed_machines, *network_assumptions(job_scenario)]:
        tail += wrapped("assumed:", "; ".join(assumed))
    tail.append("more:       --explain says why; --out job/ writes a folder that starts")
    rows = list(_gpu_rows(job_scenario, job))
    room = max(_LEAST_ROWS, MAX_ANSWER_LINES - len(head) - len(tail) - 2)
    table = aligned_rows(rows[: room + 1] if len(rows) <= room + 1 else rows[:room])
    if len(rows) > room + 1:
        table.append(f"            and {len(rows) - room} rows more: --explain")
    return [*head, *table, *tail]


def _expert_lines(job_scenario: Scenario, job: Job) -> list[str]:
    """Return lines on experts that are gathered instead of divided, or divided instead of gathered if that is faster.

    Empty for models without experts, and for jobs that do not share sequences.
    """
    if not isinstance(job.planned, PlannedSchedule) or job.cluster.num_ranks == 1:
        return []
    other = other_experts(job_scenario.cost, job.planned.schedule)
    is_divided = job.workload.experts is not None
    if other is None or (not is_divided and other.iteration_s > (1 - MIN_ADVICE_GAIN) * job.step_s):
        return []
    return wrapped("experts:", other_experts_text(other) + ("" if is_divided else ": --experts best"))


def _training_text(scenario: Scenario, job: Job) -> str:
    """Say what is trained: model, weights, sequences and their length."""
    work = job.workload
    sequences = job.planned.tokens // work.seq_len
    weights = f"{work.trained_in_words}, " if work.adapter_rank else ""
    noun = "sequence" if sequences == 1 else "sequences"
    return f"{scenario.model.name}, {weights}{sequences} {noun} of {work.seq_len:,} tokens a step"


def _other_texts(scenario: Scenario, found: FoundJobs) -> list[str]:
    """Return a sentence for the best job of every other kind: how much slower it is, and why."""
    texts = []
    for job in found.jobs[1:]:
        slower = slower_text(job.step_s / found.best.step_s)
        name = f"{KINDS[job.kind]} ({job.cluster.devices[0].name})" if job.kind == ONE else KINDS[job.kind]
        texts.append(f"{name}: {slower}, {time_text(job.step_s)} a step; {job.limit}")
    texts += (f"{KINDS[refused.kind]}: no, {refused.reason}" for refused in found.refused)
    return texts


def _gpu_rows(scenario: Scenario, job: Job) -> list[tuple[str, ...]]:
    """Return column titles and rows of the table of GPUs: the share of every set of equal ranks, and its memory."""
    if isinstance(job.planned, PlannedPipelines):
        return _stage_rows(job.planned)
    memory: Sequence[int]
    if isinstance(job.planned, PlannedBatch):
        memory = job.planned.memory_bytes
        sizes = job.planned.split.micro_batch_sizes
        shares: list[tuple[str, ...]] = [(str(sizes[replica]),) for replica in job.planned.replica_of_rank]
        heads: tuple[str, ...] = ("samples",)
    else:
        assert isinstance(job.planned, PlannedSchedule)
        schedule = job.planned.schedule
        memory = job.planned.prediction.memory_bytes
        tokens = schedule.tokens(scenario.workload.seq_len)
        heads_of = {
            rank: count for group in schedule.groups for rank, count in zip(group.ranks, group.heads, strict=True)
        }
        shares = [(f"{tokens[rank]:,}", str(heads_of[rank])) for rank in range(job.cluster.num_ranks)]
        heads = ("tokens", "heads")
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, device in enumerate(job.cluster.devices):
        need = f"{bytes_text(memory[rank])} of {bytes_text(device.usable_bytes)}"
        ranks_of.setdefault((device.name, *shares[rank], need), []).append(rank)
    rows = [(rank_ranges(ranks), *cells) for cells, ranks in ranks_of.items()]
    return [("ranks", "GPU", *heads, "memory GiB"), *rows]


def _stage_rows(planned: PlannedPipelines) -> list[tuple[str, ...]]:
    """Return column titles and rows of the table of stages; a stage of several kinds of devices has a row for each."""
    from ds_hetero.cli.printing import stage_rows

    assert planned.finished is not None
    rows: list[tuple[str, ...]] = []
    for row in stage_rows(planned.costs, planned.finished):
        if row is None:
            continue
        pipelines, batches, stage, devices, layers, seconds, need, has = row
        cells = (f"{pipelines} {batches}".strip(), stage, layers, seconds)
        for name, need_of_part, has_of_part in zip(
            devices.split(" + "), need.split(" + "), has.split(" + "), strict=True
        ):
            rows.append((*cells, name, f"{need_of_part} of {has_of_part}"))
            cells = ("", "", "", "")
    return [("micro-batches", "stage", "layers", "time", "GPUs", "memory GiB"), *rows]


def explain_job(scenario: Scenario, job_scenario: Scenario, found: FoundJobs, price_lines: Sequence[str]) -> None:
    """Print the best job and all others with every detail."""
    from ds_hetero.cli.planning.pipelines_answer import show_pipelines
    from ds_hetero.cli.planning.schedule_answer import show_schedule

    job = found.best
    print("\n".join(headline(job)))
    lines = [*price_lines, assumed_line(job_scenario)]
    if isinstance(job.planned, PlannedSchedule):
        show_schedule(job_scenario, job.planned, lines, None, None)
    elif isinstance(job.planned, PlannedPipelines):
        show_pipelines(job_scenario, job.planned, lines)
    else:
        assert isinstance(job.planned, PlannedBatch)
        head, *rows = _gpu_rows(job_scenario, job)
        print_table(head, rows, f"Samples of a micro-batch, {job.planned.split.micro_steps} a step")
        slowest = max(job.planned.predictions, key=lambda prediction: prediction.iteration_s)
        print_lines(_training_text(scenario, job), *prediction_lines(slowest), *lines)
    print(f"The best of each kind, over all settings that were left open, in {time_text(found.search_s)}")
    for other in found.jobs:
        print("\n".join(_explained(scenario, found, other)))
    for refused in found.refused:
        print("\n".join(wrapped("", f"{KINDS[refused.kind]}: no, {refused.reason}", indent=2)))


def _explained(scenario: Scenario, found: FoundJobs, job: Job) -> list[str]:
    """Return lines on a job: time of a step, ratio to the best job's, micro-batches, settings, and bottleneck."""
    factor = f"{job.step_s / found.best.step_s:.2f} x"
    batches = f"{job.workload.micro_batches} x {job.workload.micro_batch}"
    name = job_title(job)
    if isinstance(job.planned, PlannedBatch):
        batches = str(job.planned.split)
    return [
        *wrapped("", f"{name}: {time_text(job.step_s)} a step, {factor}", indent=2),
        *wrapped("", f"micro-batches {batches}; {', '.join(job.settings)}; {job.limit}", indent=4),
    ]
