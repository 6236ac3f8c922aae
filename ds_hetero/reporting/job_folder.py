"""Folder that starts a job: configuration, plan, launch scripts, and a README with what to change and to expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain

from ds_hetero.common.reading import JsonDict, JsonObject
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.cost.terms.layer_memory import MLP_TILE_TOKENS
from ds_hetero.planner.jobs.batch import PlannedBatch
from ds_hetero.planner.jobs.job import Job
from ds_hetero.planner.jobs.kinds import BATCH, ONE, PIPELINES, SEQUENCE
from ds_hetero.reporting.launching import JobLaunch, launch_contents

PLAN, CONFIG, README = "plan.json", "ds_config.json", "README.md"
_CLIPPING = 1.0  # the usual norm of gradients in ds_config.json; not part of the plan


def ds_config(job: Job, plan: JsonObject) -> JsonDict:
    """Return the content of ds_config.json for a job.

    Args:
        plan: content of the plan file, without its scenario.
    """
    work = job.workload
    zero: JsonDict = {"stage": work.zero_stage}
    if work.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    section: JsonDict = {"seq_len": work.seq_len}
    config: JsonDict = {"gradient_clipping": _CLIPPING, "bf16": {"enabled": True}, "zero_optimization": zero}
    if job.kind in (SEQUENCE, ONE):
        config["train_micro_batch_size_per_gpu"] = work.micro_batch
        config["gradient_accumulation_steps"] = work.micro_batches
    if job.kind == SEQUENCE:
        config["sequence_parallel_size"] = job.cluster.num_ranks
        section["schedule"] = dict(plan)
    if job.kind == PIPELINES:
        config["train_batch_size"] = work.micro_batch * work.micro_batches
        section["schedule"] = dict(plan)
    if job.kind == BATCH:
        _configure_batch(job, plan, config, section)
    if work.zero_within:
        section["zero_within"] = "node"
    if work.keeps_attention:
        section["keep_attention"] = True
    if work.ring_gradients != "fp32" and _has_ring(job):
        section["ring_gradients"] = work.ring_gradients
    if work.experts is not None:
        section["experts"] = list(work.experts) if isinstance(work.experts, tuple) else work.experts
    if work.tiled_mlp or work.tiled_logits:
        section["tile_tokens"] = work.tile_tokens or MLP_TILE_TOKENS
    return {**config, "heterogeneity": section}


def _has_ring(job: Job) -> bool:
    """Return True if ranks of the job share sequences in a ring of several groups."""
    if job.kind == ONE or (job.kind == BATCH and _replicas_are_ranks(job)):
        return False
    stages = chain.from_iterable(pipeline.stages for pipeline in job.planned.plan.pipelines)
    return any(stage.schedule is not None and stage.schedule.ring_size > 1 for stage in stages)


def _configure_batch(job: Job, plan: JsonObject, config: JsonDict, section: JsonDict) -> None:
    """Add to ``config`` and ``section`` the batch of each rank, or the plan if replicas have several ranks or tiles."""
    assert isinstance(job.planned, PlannedBatch)
    split = job.planned.split
    if _replicas_are_ranks(job):
        config["sequence_parallel_size"] = 1
        config["gradient_accumulation_steps"] = split.micro_steps
        section["batch"] = list(split.micro_batch_sizes)
        del section["seq_len"]  # such a job plans no sequence
    else:
        config["train_batch_size"] = split.samples
        section["schedule"] = dict(plan)


def _replicas_are_ranks(job: Job) -> bool:
    """Return True if the key "batch" gives every rank its samples; False if the plan of a batch is a schedule."""
    assert isinstance(job.planned, PlannedBatch)
    has_tiles = job.workload.tiled_mlp or job.workload.tiled_logits  # which the key "batch" rules out
    return len(job.planned.split.micro_batch_sizes) == job.cluster.num_ranks and not has_tiles


def script_lines(job: Job) -> list[str]:
    """Return the lines that the user adds to a training script."""
    lines = ["import ds_hetero", "ds_hetero.register()   # before the Trainer, the Accelerator or the engine is made"]
    work = job.workload
    if work.activation_checkpointing and work.offload_activations:
        lines.append("model.activation_checkpointing_enable(offload=True)")
    elif work.activation_checkpointing:
        lines.append("model.gradient_checkpointing_enable()   # transformers 5.23: activation_checkpointing_enable()")
    return lines


def trainer_arguments(job: Job) -> dict[str, int] | None:
    """Return the values of TrainingArguments that agree with ds_config.json.

    Returns:
        ``per_device_train_batch_size`` and ``gradient_accumulation_steps``; None if no batch size of the Trainer gives
        the ranks their samples.
    """
    work = job.workload
    per_device, steps = work.micro_batch, work.micro_batches
    if job.kind == PIPELINES:
        per_device, steps = work.micro_batch * work.micro_batches, 1
    if job.kind == BATCH:
        assert isinstance(job.planned, PlannedBatch)
        split = job.planned.split
        if _replicas_are_ranks(job):
            per_device, remainder = divmod(sum(split.micro_batch_sizes), len(split.micro_batch_sizes))
            steps = split.micro_steps
            if remainder:
                return None
        else:
            per_device, steps = split.samples, 1
    return {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": steps}


def visible_devices(job: Job) -> dict[int, list[int]]:
    """Return the numbers of the devices that take part, by node of the job; only nodes that leave devices out."""
    whole = job.whole_cluster
    kept = [rank for rank in range(whole.num_ranks) if rank not in job.left_out]
    nodes: dict[int, list[int]] = {}
    for rank in kept:
        node = int(whole.node_of_rank[rank])
        first = int((whole.node_of_rank < node).sum())
        nodes.setdefault(node, []).append(rank - first)
    visible = {}
    for number, (node, devices) in enumerate(nodes.items()):
        if len(devices) < len(whole.nodes[node].devices):
            visible[number] = devices
    return visible


def folder_contents(job: Job, plan: JsonObject, scenario: JsonObject, expected: Sequence[str]) -> dict[str, str]:
    """Return the content of each file of the folder, by the file's name.

    Args:
        plan: content of the plan file, without its scenario.
        scenario: what the plan was made for.
        expected: lines of the README on the predicted speed, duration and price of the job.
    """
    hosts = ("localhost",) if len(job.cluster.nodes) == 1 else ()
    launch = JobLaunch.of(job.cluster.nodes, hosts=hosts, command=f"train.py --deepspeed {CONFIG}")
    files = launch_contents(launch)
    visible = visible_devices(job)
    if visible:
        cases = [f"  {node}) export CUDA_VISIBLE_DEVICES={','.join(map(str, ids))};;" for node, ids in visible.items()]
        files["env.sh"] += "\n".join(
            [
                "# The plan leaves out some devices, which are numbered as in --gpus.",
                "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
                'case "${node:-0}" in',
                *cases,
                "esac\n",
            ]
        )
    files[PLAN] = json.dumps({**plan, "scenario": scenario}, indent=1) + "\n"
    files[CONFIG] = json.dumps(ds_config(job, plan), indent=2) + "\n"
    files[README] = _readme(job, launch, expected, is_partial=bool(visible))
    return files


def _readme(job: Job, launch: JobLaunch, expected: Sequence[str], *, is_partial: bool) -> str:
    """Return the text that says what to change, how to start, what to expect and how to check it."""
    several = len(launch.hosts) > 1
    where = ", the same folder on all hosts" if several else ""
    start = "bash torchrun.sh NODE   # on every host, with its number from 0" if several else "bash torchrun.sh 0"
    memory = _memory_bytes(job)
    need = [
        f"- rank {rank}, {device.name}: {bytes_text(memory[rank])} of {bytes_text(device.usable_bytes)} GiB"
        for rank, device in enumerate(job.cluster.devices)
        if rank in memory
    ]
    lines = [
        "# This job",
        "",
        *expected,
        "",
        "## Change in your script",
        "",
        "```python",
        *script_lines(job),
        "```",
        "",
        *_further_changes(job),
        "## Start",
        "",
        f"Copy your train.py into this folder{where}, then here:",
        "",
        "```bash",
        start,
        "```",
        "",
        "`deepspeed.sh`, `accelerate.sh` and `slurm.sh` start the same job"
        + (", but only torchrun.sh leaves out devices of a host." if is_partial else "."),
    ]
    if several:
        lines.append(
            f"The hosts are named {', '.join(launch.hosts)}; for other names: ds-hetero launch-files {PLAN} --hosts "
            "A,B --out ."
        )
    lines += [
        "",
        "## Expect",
        "",
        f"A step takes {time_text(job.step_s)}, {job.planned.tokens_per_s:,.0f} tokens/s. Memory at the peak:",
        "",
        *need,
        "",
        "## Check",
        "",
        "```bash",
        f"torchrun --nproc-per-node {launch.slots[0]} -m ds_hetero.cli selftest --measure --out selftest.txt",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _further_changes(job: Job) -> list[str]:
    """Return sentences for the README on changes of the script that are not in `script_lines`."""
    work = job.workload
    lines = []
    if work.adapter_rank:
        lines.append(f"Add the adapters in your script: {work.trained_in_words} (`get_peft_model` of PEFT).")
    arguments = trainer_arguments(job)
    if arguments is None:
        assert isinstance(job.planned, PlannedBatch)
        lines.append(no_batch_size(job.planned.split.micro_batch_sizes))
    else:
        values = ", ".join(f"{name}={value}" for name, value in arguments.items())
        lines += [
            f"With the HF Trainer, set `TrainingArguments({values}, bf16=True)`, as {CONFIG} has it.",
            f"With accelerate, the batch size of the loader is {arguments['per_device_train_batch_size']}.",
        ]
    return [*lines, ""]


def no_batch_size(sizes: Sequence[int]) -> str:
    """Return why no batch size of the Trainer gives the ranks these numbers of samples, and what to do."""
    return (
        f"The ranks' samples, {list(sizes)}, have no whole mean, so that no batch size of the Trainer or of "
        f"accelerate gives them. Train in a custom loop, or plan a global batch that is a multiple of {len(sizes)}."
    )


def _memory_bytes(job: Job) -> dict[int, float]:
    """Return the bytes of memory that each rank needs; for pipelines, as the plan file says."""
    if isinstance(job.planned, PlannedBatch):
        return dict(enumerate(job.planned.memory_bytes))
    predicted = job.planned.plan.predicted
    if predicted is not None:
        return {int(rank): float(need) for rank, need in predicted.get("memory_bytes", {}).items()}
    prediction = getattr(job.planned, "prediction", None)
    return {} if prediction is None else dict(enumerate(prediction.memory_bytes))
