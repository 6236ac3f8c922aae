"""An engine of an elastic job: what its state is, when it is saved, and how a new world puts it back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hetero.common.announce import announce
from ds_hetero.common.reading import JsonObject
from ds_hetero.decision.decide import JobStart
from ds_hetero.elastic.content import Content
from ds_hetero.elastic.resume import LoadedSave, SavesInMemory, find_newest
from ds_hetero.elastic.snapshots import Cards, SaveRules, Snapshots
from ds_hetero.elastic.worker import Worker, own_worker
from ds_hetero.engine.names import SCHEDULED
from ds_hetero.errors import CheckpointError, ConfigError
from ds_hetero.frameworks.deepspeed.in_memory import FrozenSample, load_parts, parts_in_memory
from ds_hetero.job.joining import LEAST_GAIN_OF_JOINING, gain_of_joining
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.epochs import process_states, set_process_states
from ds_hetero.values.section import SECTION, ElasticSection

logger = logging.getLogger(__name__)

Objects = Mapping[str, Any]  # with ``state_dict`` and ``load_state_dict``, by a name of the script's

_latest: weakref.ref[ElasticEngine] | None = None


class ElasticEngine:
    """An engine whose state outlives its process; ``stages``: the whole model's parameters, where ranks have parts."""

    def __init__(self, engine: Any, worker: Worker, start: JobStart, stages: list[Described] | None = None) -> None:
        _expect_supported(engine)
        self._living_engine, self._worker, self._start = weakref.ref(engine), worker, start
        self._section = start.section.elastic or ElasticSection()
        self._model = _fingerprint(engine, stages)
        self._group = dist.new_group(backend="gloo")
        self._objects: Objects = {}
        self._frozen: FrozenSample  # taken by `go_on`
        self._with_frozen = True
        self._is_pipeline = stages is not None
        self._changing: set[int] = set()  # addresses of tensors that the script was seen to change between two steps
        self._begin_s = time.perf_counter()
        self._workers: list[str] = []  # names, by rank
        self._judged: dict[str, bool] = {}  # whether machines that wait pay, by their cards
        self.events: list[JsonObject] = []
        self.snapshots: Snapshots | None = None
        self._saves_itself = False
        self._unsaved_step: int | None = None  # done since the loop has last asked for a batch

    @property
    def _engine(self) -> Any:
        engine = self._living_engine()
        assert engine is not None
        return engine

    def resume(self, objects: Objects) -> int | None:
        """Put back the newest save and save from here on; return its step, or None where the job begins.

        Args:
            objects: of the script, that are a part of its state.

        Caller: every rank, once.
        """
        self._expect_scheduler(objects)
        found = find_newest(self._worker, self._group)
        self.go_on(objects, found)
        self._saves_itself = True
        return None if found.newest is None else found.newest.save.step

    def _expect_scheduler(self, objects: Objects) -> None:
        """Refuse a learning-rate scheduler that no save has: it would begin anew after a fault."""
        engine = self._engine
        optimizer = getattr(engine.optimizer, "inner", engine.basic_optimizer)
        is_kept = engine.lr_scheduler is not None or any(hasattr(one, "get_last_lr") for one in objects.values())
        if hasattr(optimizer.step, SCHEDULED) and not is_kept:
            raise ConfigError(
                "the optimizer has a learning-rate scheduler that an elastic job would lose. Give it to "
                'deepspeed.initialize as lr_scheduler, or to handle.elastic(loader, extra={"scheduler": scheduler}).'
            )

    def go_on(self, objects: Objects, found: SavesInMemory) -> None:
        """Put back a save that was found, and save from here on; on every rank. Raises `CheckpointError`."""
        if self.snapshots is not None:
            raise ConfigError("handle.elastic was called twice for one engine.")
        for name, one in objects.items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(
                    f"handle.elastic cannot keep {name!r}: a {type(one).__name__} has no state_dict and "
                    "load_state_dict."
                )
        self._objects = dict(objects)
        self._demand()
        self._frozen = FrozenSample(self._engine)
        self._with_frozen = not self._is_on_any_rank(bool(self._frozen.sums))
        found.expect(self._model, self._worker)
        kept = found.newest
        if kept is not None:
            self._put_back(kept)
        self._workers = on_all_ranks(lambda: self._worker.name, self._group)
        start = [f"{time.time_ns():020d}-{secrets.token_hex(4)}"]
        dist.broadcast_object_list(start, 0, group=self._group)
        self.snapshots = Snapshots(
            self._worker,
            self._group,
            SaveRules(
                model=self._model,
                start=start[0],
                every_steps=self._section.every_steps,
                copies=self._section.copies,
                notice_s=self._section.notice_s,
                resumed=None if kept is None else kept.save,
            ),
            self._take,
            self._has_changed,
            self._say,
            self._pays,
        )
        self._say_begin(kept)

    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take an engine's step: wait for copies before it; an optimizer step of a loop of its own is to be saved."""
        self._snapshots().before_step()
        engine = self._engine
        before = engine.global_steps
        result = step(*args, **kwargs)
        if self._saves_itself and engine.global_steps > before:
            self._unsaved_step = engine.global_steps
        return result

    def end_batch(self) -> None:
        """Save or end, when a custom loop requests the next batch and so has finished a step."""
        if self._unsaved_step is not None:
            step, self._unsaved_step = self._unsaved_step, None
            self.after_step(step)
        self.leave_if_due()

    def _snapshots(self) -> Snapshots:
        if self.snapshots is None:
            raise ConfigError(
                "this job is elastic, but its script does not say what to resume: call handle.elastic(loader) before "
                "the first step of a loop of your own, with accelerate too. The HF Trainer needs no such call."
            )
        return self.snapshots

    def after_step(self, step: int) -> None:
        """Commit and save what is due; see `Snapshots.after_step`."""
        self._snapshots().after_step(step)

    def leave_if_due(self) -> None:
        """End this process between two steps, if all ranks have agreed to; see `Snapshots.leave_if_due`."""
        if self.snapshots is not None:
            self.snapshots.leave_if_due()

    def _demand(self) -> None:
        """Tell the keepers what the section asks for."""
        least, gib = self._section.min_ranks, self._section.memory_gib
        try:
            if least is not None and dist.get_rank() == 0:
                self._worker.ask_meeting({"do": "demand", "least": least})
            if gib is not None:
                self._worker.ask_keeper({"do": "demand", "memory_bytes": int(gib * 2**30)})
        except OSError as error:
            logger.warning("the keeper does not take what the section asks for: %s", error)

    def _has_changed(self) -> bool:
        """Whether the script has changed parameters that are not trained; those come from it again until it does."""
        return not self._with_frozen and self._frozen.has_changed()

    def _take(self, has_changed: bool) -> Content:
        """Collect this rank's state: by reference what only the engine changes; the rest is copied before going on.

        Args:
            has_changed: whether parameters that are not trained have been changed on any rank.
        """
        engine = self._engine
        device = get_accelerator()
        self._with_frozen |= has_changed
        objects = {name: one.state_dict() for name, one in self._objects.items()}
        with parts_in_memory(engine, with_frozen=self._with_frozen) as parts:
            return Content(
                {
                    "parts": parts,
                    "frozen": None if self._with_frozen else self._frozen.sums,
                    "batch": engine.train_batch_size(),
                    "workers": self._workers,
                    "objects": objects,
                    "random": process_states(),
                    "device_random": None if device.device_name() == "cpu" else device.get_rng_state(),
                },
                self._held(parts, objects),
                self._changing.update,
            )

    def _held(self, parts: Mapping[str, Any], objects: Mapping[str, Any]) -> set[int]:
        """Addresses of the tensors that nothing but the engine's next step changes, which waits for their copies.

        With ZeRO and in pipelines these are the shards of master weights and of the optimizer's state, which a script
        has no names for, and the trained weights, which the step makes anew of them. On ZeRO-0 all are the script's.
        """
        engine = self._engine
        if engine.zero_optimization_stage() == 0 and not self._is_pipeline:
            return set()
        of_script = [*engine.module.buffers(), *self._frozen.tensors(), *saved_tensors(objects)]
        changing = {one.data_ptr() for one in of_script} | self._changing
        return {one.data_ptr() for one in saved_tensors(parts)} - changing

    def _pays(self, cards: Cards) -> bool:
        """Whether the planner says that machines with such cards pay, or cannot say."""
        known = {node: [card for card in of_node if card is not None] for node, of_node in cards.items()}
        key = repr(sorted(cards.items()))
        if key not in self._judged:
            is_known = all(len(known[node]) == len(cards[node]) for node in cards)
            gain = gain_of_joining(self._start, known) if is_known else None
            self._judged[key] = gain is None or gain >= LEAST_GAIN_OF_JOINING
            if not self._judged[key]:
                self._say(
                    "does not join",
                    machines=known,
                    gain=round(gain or 0.0, 3),
                    remedy="they wait for a loss; start them with --card none to let them in anyway",
                )
        return self._judged[key]

    def _is_on_any_rank(self, condition: bool) -> bool:
        number = torch.tensor(int(condition))
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return bool(number)

    def _put_back(self, kept: LoadedSave) -> None:
        engine = self._engine
        rank = dist.get_rank()
        own = kept.contents[rank if rank < kept.save.world_size else 0]
        if own["batch"] != engine.train_batch_size():
            raise CheckpointError(
                f"the job was saved with {own['batch']} samples in a global batch, and has {engine.train_batch_size()} "
                f"with these {dist.get_world_size()} ranks: it would not train as one process. Let the number of ranks "
                "not change the batch: one replica over all ranks, or samples that divide among any number of them."
            )
        if own["objects"].keys() != self._objects.keys():
            raise CheckpointError(
                f"the job was saved with {sorted(own['objects'])} as its own state, and handle.elastic was given "
                f"{sorted(self._objects)}. Give it the same names."
            )
        self._with_frozen = own["frozen"] is None
        saved = {key: one for content in kept.contents for key, one in (content["frozen"] or {}).items()}
        # Of a parameter that is cut, ranks of another world hold another part.
        differs = any(saved.get(key, one) != one for key, one in self._frozen.sums.items() if not key[1])
        if self._is_on_any_rank(differs):
            raise CheckpointError(
                "the parameters that are not trained are not those that the job was begun with, and saves do not "
                "hold them. Let every start make the same ones: load them, or set a seed before they are made."
            )
        parts = {name: state for content in kept.contents for name, state in content["parts"].items()}
        load_parts(engine, parts, with_frozen=self._with_frozen)
        for name, one in self._objects.items():
            one.load_state_dict(own["objects"][name])
        set_process_states(own["random"])
        if own["device_random"] is not None and get_accelerator().device_name() != "cpu":
            get_accelerator().set_rng_state(own["device_random"])

    def _say_begin(self, kept: LoadedSave | None) -> None:
        seconds = {"prepared_s": round(time.perf_counter() - self._begin_s, 3)}
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # events of the rounds before, as far as this keeper has them
                self.events += self._worker.ask_meeting({"do": "status"})["events"]
        if kept is None:
            self._say("begin", round=self._worker.round_number, **seconds)
            return
        before = kept.contents[0]["workers"]
        changes = {
            "gone": [name for name in before if name not in self._workers],
            "new": [name for name in self._workers if name not in before],
        }
        self._say(
            "resume",
            round=self._worker.round_number,
            step=kept.save.step,
            ranks=f"{kept.save.world_size} -> {dist.get_world_size()}",
            **{name: workers for name, workers in changes.items() if workers},
            fetched_bytes=kept.fetched_bytes,
            found_s=round(kept.seconds, 3),
            **seconds,
        )

    def _say(self, kind: str, **details: object) -> None:
        """Say an event on rank 0, also to the monitor, and have the keepers remember it."""
        if dist.get_rank() != 0:
            return
        announce(f"elastic: {kind}, {', '.join(f'{name} {value}' for name, value in details.items())}")
        event = {"kind": kind, "time": time.time(), "ranks": dist.get_world_size(), **details}
        self.events.append(json.loads(json.dumps(event, default=str)))
        engine = self._living_engine()
        if engine is not None and engine.monitor.enabled:
            numbers = {name: one for name, one in event.items() if name != "time" and isinstance(one, int | float)}
            group = f"Heterogeneity/elastic/{kind.replace(' ', '_')}"
            engine.monitor.write_events(
                [(f"{group}/{name}", float(one), engine.global_samples) for name, one in numbers.items()]
            )
        with contextlib.suppress(OSError):  # it was said above
            self._worker.ask_meeting({"do": "event", "event": self.events[-1]})


def saved_tensors(state: object) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for one in state.values():
            yield from saved_tensors(one)
    elif isinstance(state, list | tuple):
        for one in state:
            yield from saved_tensors(one)


Described = tuple[str, tuple[int, ...], str, bool]
"""A parameter: name, whole shape, type, and whether it is trained."""


def describe_parameters(model: torch.nn.Module) -> list[Described]:
    """Return the parameters of a model, whatever of them is on this rank."""
    return [
        (name, tuple(getattr(parameter, "ds_shape", parameter.shape)), str(parameter.dtype), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]


def prepare(engine: Any, start: JobStart, stages: list[Described] | None = None) -> ElasticEngine | None:
    """Make an engine elastic if its job is; None if not. Raises `ConfigError` on every rank: it cannot be.

    Args:
        stages: the parameters of the whole model, where each rank holds a stage of it.

    Caller: every rank.
    """
    global _latest
    worker, section = own_worker(), start.section
    if worker is None:
        if section.elastic is not None:
            raise ConfigError(
                f'"{SECTION}.elastic" needs a launcher that starts ranks again: python -m ds_hetero.run --elastic '
                "SCRIPT on every node, or torchrun --rdzv-backend ds_hetero. Leave the key out under others."
            )
        return None
    if stages is None and (len(start.plan.pipelines) > 1 or section.batch is not None):
        refuse_other_engines("a plan of several replicas, whose global batch would change with the number of ranks,")
    if _latest is not None and _latest() is not None:
        raise ConfigError("an elastic job trains one engine; this process has made a second one.")
    job = ElasticEngine(engine, worker, start, stages)
    _latest = weakref.ref(job)
    return job


def refuse_other_engines(what: str) -> None:
    """Refuse to begin an elastic job with an engine whose state would be lost. Raises `ConfigError`."""
    if own_worker() is not None:
        raise ConfigError(
            f"{what} cannot be kept by an elastic job yet: it would begin anew after a fault. Start it without "
            "--elastic."
        )


def _expect_supported(engine: Any) -> None:
    stage = engine.zero_optimization_stage()
    offload = engine.zero_offload_optimizer(), engine.zero_offload_param()
    refused = {
        "offloading to NVMe": any(one is not None and str(one.device).endswith("nvme") for one in offload),
        "ZeRO-3 with hpZ": engine.zero_hpz_partition_size() > 1,
        "mixtures of experts of DeepSpeed's own": engine.has_moe_layers,
        "universal checkpoints": engine.load_universal_checkpoint(),
        "ZeRO-0 in bf16 or fp16": stage == 0 and (engine.bfloat16_enabled() or engine.fp16_enabled()),
        "an engine without an optimizer": engine.optimizer is None,
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise ConfigError(f"{name} cannot be kept by an elastic job yet. Start it without --elastic.")


def _fingerprint(engine: Any, stages: list[Described] | None) -> str:
    """Return a hash of names and shapes of the parameters and of the stage, in which a save must agree."""
    kind = engine.zero_optimization_stage() if stages is None else "pipelines"
    shapes = describe_parameters(engine.module) if stages is None else stages
    return hashlib.sha256(repr((kind, shapes)).encode()).hexdigest()[:16]
