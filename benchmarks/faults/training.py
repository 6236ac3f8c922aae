"""The training of a job's ranks: a tiny Llama on an uneven schedule, in a custom loop or under the HF Trainer.

Checkpoints are written after the first step and after the step of the fault. Every rank writes its losses down; those
of the training that continues from the last checkpoint are compared with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.faults.jobs import FOREIGN, GENERATE, LOCAL, MISMATCHES, NOT_REGISTERED, Job
from benchmarks.faults.plant import FAULT_STEP, Plant, Planted

STEPS = FAULT_STEP + 2
SAVED_AFTER = (1, FAULT_STEP)
TIMEOUT_S = 6.0
"""Of the process group where a job `takes_timeout`; for nothing else do the others have to wait that long."""

_BATCH, _LENGTH, _VOCABULARY = 2, 32, 64
_LINK = {"bandwidth_gb_per_s": 2, "latency_us": 50}
_TWO_GROUPS = [{"ranks": [0], "tokens": [3], "heads": [4]}, {"ranks": [1], "tokens": [1], "heads": [4]}]
_ONE_GROUP = [{"ranks": [0, 1], "tokens": [1, 2], "heads": [4, 0]}]
_FOUR_RANKS = [  # rank 1 holds no token, rank 3 computes no head
    {"ranks": [0, 2], "tokens": [3, 1], "heads": [3, 1]},
    {"ranks": [1, 3], "tokens": [0, 2], "heads": [4, 0]},
]


def train(job: Job, rank: int, folder: Path, resume: bool) -> None:
    """Train with the job's fault; or, with ``resume``, from the last checkpoint without it.

    Args:
        job: circumstances and fault.
        rank: of this process.
        folder: of the job.
        resume: continue from the last checkpoint, and write the losses to another file.
    """
    import deepspeed

    import ds_hetero

    if job.is_restarted:
        ds_hetero.register()  # before the process group is made
    timeout = timedelta(seconds=TIMEOUT_S) if job.takes_timeout and not resume else None
    deepspeed.init_distributed("gloo", verbose=False, **({} if timeout is None else {"timeout": timeout}))
    _probe_briefly()
    plant = Plant(job, rank if not resume or job.is_restarted else -1, folder)
    plant.in_functions()
    plant.in_saving()
    difference = job.fault if job.fault in MISMATCHES and rank == job.victim and not resume else ""
    if difference:
        plant.note()
    handle = None if difference == NOT_REGISTERED else ds_hetero.register()
    model = _llama(num_layers=3 if difference == "another model" else 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    plant.in_model(model.model.layers[0 if job.pipelines else 1 :])
    config = _ds_config(job)
    if difference in _DIFFERENCES:
        config = _DIFFERENCES[difference](config)
    plant.strike("model")
    run = _train_in_loop if job.loop == "loop" else _train_by_trainer
    record = _Record(folder, rank, resume, saves=not resume or job.is_restarted)
    if resume and job.is_restarted:
        last = last_checkpoint(job, folder)
        record(0 if last is None else int((last / "latest").read_text().rpartition("step")[2]), None)
    run(job, plant, record, handle, model, optimizer, config)


def checkpoints(folder: Path) -> Path:
    """Return the folder of a job's checkpoints."""
    return folder / "checkpoints"


def last_checkpoint(job: Job, folder: Path) -> Path | None:
    """Return the folder of the last finished checkpoint, by the file ``latest``; None if there is none."""
    if job.loop == "loop":
        return checkpoints(folder) if (checkpoints(folder) / "latest").exists() else None
    finished = [path.parent for path in checkpoints(folder).glob("checkpoint-*/latest")]
    return max(finished, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class _Record:
    """Records the losses of a rank, one line per step, in a file of its own."""

    def __init__(self, folder: Path, rank: int, resume: bool, saves: bool) -> None:
        self.folder, self.resume, self.saves = folder, resume, saves
        name = f"{'resumed' if resume else 'losses'}{rank}"
        self._file = (folder / name).open("a", buffering=1)  # open before the rank may lose its rights

    def __call__(self, step: int, loss: float | None) -> None:
        self._file.write(json.dumps([step, loss]) + "\n")


def losses_by_step(folder: Path, rank: int, resumed: bool) -> dict[int, float]:
    """Return the losses of a rank by step."""
    return {step: loss for step, loss in recorded_losses(folder, rank, resumed) if loss is not None}


def recorded_losses(folder: Path, rank: int, resumed: bool) -> list[tuple[int, float | None]]:
    """Return pairs of step and loss in order; a restart by torchrun begins with the last saved step and no loss."""
    path = folder / f"{'resumed' if resumed else 'losses'}{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(step, loss) for step, loss in map(json.loads, lines)]


class _Samples(Dataset[dict[str, Tensor]]):
    """Random tokens; the fault may strike when a sample is read."""

    def __init__(self, plant: Plant, first: int = 0) -> None:
        self._plant, self._first = plant, first

    def __len__(self) -> int:
        return STEPS * _BATCH - self._first

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._plant.strike("data set")
        ids = torch.randint(_VOCABULARY, (_LENGTH,), generator=torch.Generator().manual_seed(self._first + index))
        return {"input_ids": ids, "labels": ids.clone()}


def _collator(plant: Plant) -> Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]:
    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        plant.strike("collator")
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return collate


def _train_in_loop(
    job: Job, plant: Plant, record: _Record, handle: Any, model: Any, optimizer: Any, config: dict[str, Any]
) -> None:
    """Train in a custom loop."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    folder = str(checkpoints(record.folder))
    if record.resume and last_checkpoint(job, record.folder) is not None:
        loaded, _ = engine.load_checkpoint(folder)
        assert loaded is not None
    samples = _Samples(plant, engine.global_steps * _BATCH)
    loader = DataLoader(samples, batch_size=_BATCH, collate_fn=_collator(plant))
    plant.step = engine.global_steps + 1  # before the first batch is read
    for batch in handle.dataloader(loader):
        if job.fault in ("continue", "break") and plant.is_due("between steps"):
            plant.note()
            if job.fault == "break":
                break
            continue
        try:
            if job.fault == "caught exception":
                model.model.layers[1].register_forward_pre_hook(lambda *_: plant.strike("between steps"))
            loss = handle.loss(engine(**batch), batch)
        except Planted:
            if job.fault != "caught exception":
                raise
            continue
        engine.backward(loss)
        engine.step()
        record(plant.step, loss.item())
        plant.strike("between steps")
        if job.fault in FOREIGN and plant.step == FAULT_STEP and not record.resume:
            _meet_never(job, plant)
        if plant.step in SAVED_AFTER and record.saves:
            plant.before_saving()
            engine.save_checkpoint(folder)
        plant.step += 1
    if job.fault in LOCAL:
        engine.save_checkpoint(folder)


def _meet_never(job: Job, plant: Plant) -> None:
    """Call the first collective of the job's fault on half of the ranks, the second one on the others."""
    ones, subgroup = torch.ones(4), dist.new_group(list(range(job.ranks)))
    collectives = {
        "all_reduce": lambda: dist.all_reduce(ones),
        "all_gather": lambda: dist.all_gather([torch.ones(4) for _ in range(job.ranks)], ones),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(ones, 0),
        "subgroup": lambda: dist.all_reduce(ones, group=subgroup),
        "world": lambda: dist.all_reduce(ones),
    }
    if plant.is_due("between steps"):
        plant.note()
    collectives[job.fault.split(" and ")[dist.get_rank() % 2]]()


def _train_by_trainer(
    job: Job, plant: Plant, record: _Record, handle: Any, model: Any, optimizer: Any, config: dict[str, Any]
) -> None:
    """Train under the HF Trainer."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            plant.step = state.global_step + 1

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            plant.step = state.global_step
            if job.fault == "stop of one rank" and plant.is_due("between steps"):
                plant.note()
                control.should_training_stop = True
            elif job.fault == GENERATE and plant.is_due("between steps"):
                plant.note()
                model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
            else:
                plant.strike("between steps")
            if state.global_step in SAVED_AFTER and record.saves:
                plant.before_saving()
                control.should_save = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                record(state.global_step, float(logs["loss"]))

    parallelism = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=job.ranks,
        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"),
    )
    arguments = TrainingArguments(
        output_dir=str(checkpoints(record.folder)),
        max_steps=STEPS,
        per_device_train_batch_size=_BATCH,
        max_grad_norm=config.get("gradient_clipping", 1.0),
        gradient_accumulation_steps=config.get("gradient_accumulation_steps", 1),
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        deepspeed=config,
        parallelism_config=parallelism,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=_Samples(plant),
        data_collator=_collator(plant),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        callbacks=[Steps()],
    )
    plant.step = 1
    last = last_checkpoint(job, record.folder) if record.resume else None
    trainer.train(resume_from_checkpoint=None if last is None else str(last))


def _llama(num_layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_VOCABULARY,
        max_position_embeddings=128,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def _schedule(ranks: int, stage: int) -> dict[str, Any]:
    groups = _FOUR_RANKS if ranks == 4 else _TWO_GROUPS if stage % 2 else _ONE_GROUP
    return {"version": 1, "num_heads": 4, "num_kv_heads": 2, "layout": "contiguous", "groups": groups}


def _pipelines(ranks: int) -> dict[str, Any]:
    """Return a plan of two stages; on four ranks the first is sequence-parallel, and a second pipeline has one rank."""
    sequence = {"groups": [{"ranks": [0, 1], "tokens": [3, 1], "heads": [4, 0]}]}
    schedule = {"version": 1, "num_heads": 4, "num_kv_heads": 2, "layout": "contiguous", **sequence}
    split = {"ranks": [0, 1], "layers": [0, 1], "inner": "sequence", "schedule": schedule}
    first = split if ranks == 4 else {"ranks": [0], "layers": [0, 1]}
    last = {"ranks": [ranks // 2], "layers": [1, 2]}
    pipelines = [{"micro_batch_size": 1, "micro_batches": 4 // ranks, "stages": [first, last]}]
    if ranks == 4:
        pipelines.append({"micro_batch_size": 1, "micro_batches": 1, "stages": [{"ranks": [3], "layers": [0, 2]}]})
    return {"version": 2, "model": {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}, "pipelines": pipelines}


def _ds_config(job: Job) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a job."""
    plan = _pipelines(job.ranks) if job.pipelines else _schedule(job.ranks, job.stage)
    section: dict[str, Any] = {"schedule": plan}
    node = {"name": "host", "device": "CPU", "count": job.ranks, "link": _LINK}
    if job.phase in ("cache", "profile", "links"):
        section = {"cluster": "measure"}
    elif job.phase in ("describe", "plan"):
        section = {"cluster": {"nodes": [node]}, "schedule": "plan", "seq_len": _LENGTH}
    elif job.phase == "look":
        section |= {"cluster": {"nodes": [node]}, "seq_len": _LENGTH, "replan": {"enabled": True, "interval_steps": 1}}
    if job.weighted:
        section["zero_partition"] = [3, 1, 2, 1][: job.ranks]
    return {
        "train_micro_batch_size_per_gpu": _BATCH,
        "gradient_clipping": 1.0,
        "sequence_parallel_size": job.ranks,
        "zero_optimization": {"stage": job.stage, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000},
        "zero_allow_untested_optimizer": True,
        "heterogeneity": section,
    }


def _without_section(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "heterogeneity"}


def _with_zero(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return config | {"zero_optimization": config["zero_optimization"] | changes}


def _with_section(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return config | {"heterogeneity": config["heterogeneity"] | changes}


_DIFFERENCES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another stage": lambda config: _with_zero(config, stage=(config["zero_optimization"]["stage"] + 2) % 4),
    "accumulation": lambda config: config | {"gradient_accumulation_steps": 2},
    "clipping": lambda config: config | {"gradient_clipping": 0.5},
    "bucket": lambda config: _with_zero(config, reduce_bucket_size=20_000),
    "no section": _without_section,
    "switched off": lambda config: _with_section(config, enabled=False),
    "another schedule": lambda config: _with_section(config, schedule="ring"),
}
"""How the victim's ds_config.json differs, where it does."""


def _probe_briefly() -> None:
    """Let every probe of the profiler make one call; profiles are not tested here."""
    from ds_hetero.profiler import measure

    timer = measure.Timer
    measure.Timer = lambda device, window_s: timer(device, 0.0)  # type: ignore[assignment, misc]
