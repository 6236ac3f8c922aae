"""Save and restore the state of an engine in an elastic job, which goes on after ranks die or join.

`prepare` makes an `ElasticEngine` when the engine is built. `ElasticEngine.resume`, or `go_on` of the HF Trainer,
restores the newest save, or begins without one. After every optimizer step the state is saved into the memory of the
nodes, if a save is due; `ds_hetero.elastic.snapshots` does that.
"""

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
from ds_hetero.elastic.snapshots import Cards, SaveSettings, Snapshots
from ds_hetero.elastic.worker import Worker, own_worker
from ds_hetero.engine.names import SCHEDULED
from ds_hetero.errors import CheckpointError, ConfigError
from ds_hetero.frameworks.deepspeed.in_memory import FrozenSample, load_parts, parts_in_memory
from ds_hetero.job.join_gain import MIN_JOIN_GAIN, predicted_join_gain
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.random_states import process_states, set_process_states
from ds_hetero.values.section import SECTION, ElasticSection

logger = logging.getLogger(__name__)

Objects = Mapping[str, Any]
"""Objects of the script with ``state_dict`` and ``load_state_dict``, by names that the script chooses."""

_latest: weakref.ref[ElasticEngine] | None = None  # the elastic engine of this process


class ElasticEngine:
    """Saves the state of one engine into the memory of the nodes, and restores it in the processes after a restart.

    Args:
        engine: DeepSpeed's engine.
        worker: this process's connection to its agent and to the node servers of saves.
        start: what the ranks agreed on for the job.
        stages: parameters of the whole model, if each rank holds a stage of it.

    Attributes:
        events: events of the job on rank 0, the oldest first.
        snapshots: saves the state; None before `go_on`.
    """

    def __init__(
        self, engine: Any, worker: Worker, start: JobStart, stages: list[ParameterDescription] | None = None
    ) -> None:
        _expect_supported(engine)
        self._engine_ref, self._worker, self._start = weakref.ref(engine), worker, start
        self._section = start.section.elastic or ElasticSection()
        self._fingerprint = _fingerprint(engine, stages)
        self._group = dist.new_group(backend="gloo")
        self._objects: Objects = {}
        # The weighing of losses, with ``state_dict`` and ``load_state_dict``; None unless ranks take different batches.
        self.losses: Any = None
        self._frozen: FrozenSample  # made by `go_on`
        self._with_frozen = True  # whether saves include frozen parameters
        self._is_pipeline = stages is not None
        self._script_addresses: set[int] = set()  # addresses of tensors that the script changes between two steps
        self._begin_s = time.perf_counter()
        self._workers: list[str] = []  # names of the workers, by rank
        self._gains_by_cards: dict[str, bool] = {}  # whether machines that wait are worth joining, by their GPUs
        self.events: list[JsonObject] = []
        self.snapshots: Snapshots | None = None
        self._saves_itself = False  # whether steps are saved by `end_batch`, not by a Trainer that calls `after_step`
        self._unsaved_step: int | None = None  # the optimizer step that `end_batch` is to save

    @property
    def _engine(self) -> Any:
        engine = self._engine_ref()
        assert engine is not None
        return engine

    def resume(self, objects: Objects) -> int | None:
        """Restore the newest save, and save after every step from now on.

        Args:
            objects: objects of the script that are part of the state.

        Returns:
            The optimizer step of the save; None if there is no save, so that training begins at step 0.

        Caller: every rank, once.

        Raises:
            ConfigError: an object cannot be saved, or the learning-rate scheduler would not be saved.
            CheckpointError: the newest save cannot be restored.
        """
        self._expect_scheduler(objects)
        saves = find_newest(self._worker, self._group)
        self.go_on(objects, saves)
        self._saves_itself = True
        return None if saves.newest is None else saves.newest.save.step

    def _expect_scheduler(self, objects: Objects) -> None:
        """Check that the optimizer's learning-rate scheduler is among the saved objects, or is the engine's.

        A scheduler that is not saved would begin anew after a fault.

        Raises:
            ConfigError: the optimizer has a scheduler, which is neither.
        """
        engine = self._engine
        optimizer = getattr(engine.optimizer, "inner", engine.basic_optimizer)
        is_saved = engine.lr_scheduler is not None or any(hasattr(obj, "get_last_lr") for obj in objects.values())
        if hasattr(optimizer.step, SCHEDULED) and not is_saved:
            raise ConfigError(
                "the optimizer has a learning-rate scheduler that an elastic job would lose. Give it to "
                'deepspeed.initialize as lr_scheduler, or to handle.elastic(loader, extra={"scheduler": scheduler}).'
            )

    def go_on(self, objects: Objects, saves: SavesInMemory) -> None:
        """Restore the newest of ``saves``, if there is one, and let `after_step` save from now on.

        Args:
            objects: objects of the script that are part of the state.
            saves: the saves in the memory of all nodes.

        Caller: every rank, once.

        Raises:
            ConfigError: an object cannot be saved, or this is the second call.
            CheckpointError: on every rank: the save cannot be restored.
        """
        if self.snapshots is not None:
            raise ConfigError("handle.elastic was called twice for one engine. Call it once, before the first step.")
        for name, obj in objects.items():
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                raise ConfigError(
                    f"handle.elastic cannot save {name!r}: a {type(obj).__name__} does not have the methods state_dict "
                    "and load_state_dict. Add them, or leave it out."
                )
        self._objects = dict(objects)
        self._send_demands()
        self._frozen = FrozenSample(self._engine)
        self._with_frozen = not self._is_on_any_rank(bool(self._frozen.sums))
        saves.expect(self._fingerprint, self._worker)
        newest = saves.newest
        if newest is not None:
            self._restore(newest)
        self._workers = on_all_ranks(lambda: self._worker.name, self._group)
        start_id = [f"{time.time_ns():020d}-{secrets.token_hex(4)}"]
        dist.broadcast_object_list(start_id, 0, group=self._group)
        self.snapshots = Snapshots(
            self._worker,
            self._group,
            SaveSettings(
                model=self._fingerprint,
                start=start_id[0],
                every_steps=self._section.every_steps,
                copies=self._section.copies,
                notice_s=self._section.notice_s,
                resumed=None if newest is None else newest.save,
            ),
            self._capture,
            self._has_changed,
            self._say,
            self._is_worth_joining,
        )
        self._report_start(newest)

    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the engine's step: wait until the last save is copied, and note an optimizer step for `end_batch`."""
        self._snapshots().before_step()
        engine = self._engine
        steps_before = engine.global_steps
        result = step(*args, **kwargs)
        if self._saves_itself and engine.global_steps > steps_before:
            self._unsaved_step = engine.global_steps
        return result

    def end_batch(self) -> None:
        """Save the last optimizer step, if a save is due, and end the process if all ranks have agreed to.

        The loader calls this when a custom loop requests the next batch: by then the loop has finished the step.
        """
        if self._unsaved_step is not None:
            step, self._unsaved_step = self._unsaved_step, None
            self.after_step(step)
        self.leave_if_due()

    def _snapshots(self) -> Snapshots:
        """Return the object that saves. Raises `ConfigError`: neither script nor Trainer has called `go_on`."""
        if self.snapshots is None:
            raise ConfigError(
                "this job is elastic, but its script does not say what to resume: call handle.elastic(loader) before "
                "the first step of a custom loop, with accelerate too. The HF Trainer needs no such call."
            )
        return self.snapshots

    def after_step(self, step: int) -> None:
        """Commit the last save, and begin the next one if it is due; see `Snapshots.after_step`."""
        self._snapshots().after_step(step)

    def leave_if_due(self) -> None:
        """End this process between two steps, if all ranks have agreed to; see `Snapshots.leave_if_due`."""
        if self.snapshots is not None:
            self.snapshots.leave_if_due()

    def _send_demands(self) -> None:
        """Send ``min_ranks`` of the section to the rendezvous, and ``memory_gib`` to this node's server of saves."""
        min_ranks, gib = self._section.min_ranks, self._section.memory_gib
        try:
            if min_ranks is not None and dist.get_rank() == 0:
                self._worker.ask_rendezvous({"do": "demand", "least": min_ranks})
            if gib is not None:
                self._worker.ask_node_server({"do": "demand", "memory_bytes": int(gib * 2**30)})
        except OSError as error:
            logger.warning('the agent does not take "min_ranks" or "memory_gib" of the section: %s', error)

    def _has_changed(self) -> bool:
        """Return whether the script has changed frozen parameters, which saves have left out so far."""
        return not self._with_frozen and self._frozen.has_changed()

    def _capture(self, has_changed: bool) -> Content:
        """Capture this rank's state for a save.

        Tensors that only the engine's step changes are captured by reference, and copied in the background.

        Args:
            has_changed: whether frozen parameters have changed on any rank; saves include them from then on.
        """
        engine = self._engine
        device = get_accelerator()
        self._with_frozen |= has_changed
        objects = {name: obj.state_dict() for name, obj in self._objects.items()}
        with parts_in_memory(engine, with_frozen=self._with_frozen) as parts:
            return Content(
                {
                    "parts": parts,
                    "frozen": None if self._with_frozen else self._frozen.sums,
                    "batch": engine.train_batch_size(),
                    "workers": self._workers,
                    "objects": objects,
                    "losses": None if self.losses is None else self.losses.state_dict(),
                    "random": process_states(),
                    "device_random": None if device.device_name() == "cpu" else device.get_rng_state(),
                },
                self._engine_only_addresses(parts, objects),
                self._script_addresses.update,
            )

    def _engine_only_addresses(self, parts: Mapping[str, Any], objects: Mapping[str, Any]) -> set[int]:
        """Return the addresses of saved tensors that nothing but the engine's next step changes.

        The next step waits until these tensors are copied. With ZeRO and in pipelines they are the shards of master
        weights and of optimizer state, which a script does not have, and the trained weights, which the step computes
        from the shards. On ZeRO-0 the script may change every tensor.

        Args:
            parts: states of the checkpoint's files.
            objects: states of the script's objects.
        """
        engine = self._engine
        if engine.zero_optimization_stage() == 0 and not self._is_pipeline:
            return set()
        script_tensors = [*engine.module.buffers(), *self._frozen.tensors(), *saved_tensors(objects)]
        script_addresses = {tensor.data_ptr() for tensor in script_tensors} | self._script_addresses
        return {tensor.data_ptr() for tensor in saved_tensors(parts)} - script_addresses

    def _is_worth_joining(self, cards: Cards) -> bool:
        """Return whether the job should restart with the machines that wait to join.

        True if the planner predicts a gain of at least `MIN_JOIN_GAIN` from them, or cannot predict it.

        Args:
            cards: names of the GPUs of each machine.
        """
        known_cards = {}
        for node, cards_of_node in cards.items():
            known_cards[node] = [card for card in cards_of_node if card is not None]
        key = repr(sorted(cards.items()))
        if key not in self._gains_by_cards:
            are_known = all(len(known_cards[node]) == len(cards[node]) for node in cards)
            gain = predicted_join_gain(self._start, known_cards) if are_known else None
            self._gains_by_cards[key] = gain is None or gain >= MIN_JOIN_GAIN
            if not self._gains_by_cards[key]:
                self._say(
                    "does not join",
                    machines=known_cards,
                    gain=round(gain or 0.0, 3),
                    remedy="they wait for a loss; start them with --card none to let them in anyway",
                )
        return self._gains_by_cards[key]

    def _is_on_any_rank(self, condition: bool) -> bool:
        """Return whether a condition holds on any rank. Collectives: one all_reduce."""
        number = torch.tensor(int(condition))
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return bool(number)

    def _restore(self, newest: LoadedSave) -> None:
        """Restore a save.

        Raises:
            CheckpointError: on every rank: the save has another global batch, other objects of the script, or other
                frozen parameters.
        """
        engine = self._engine
        rank = dist.get_rank()
        # A rank that the saving job did not have takes the objects and random states of rank 0. The engine's state does
        # not depend on the number of ranks, see `load_parts`.
        content = newest.contents[rank if rank < newest.save.world_size else 0]
        if content["batch"] != engine.train_batch_size():
            raise CheckpointError(
                f"the job was saved with {content['batch']} samples in a global batch, and has "
                f"{engine.train_batch_size()} with these {dist.get_world_size()} ranks: it would not train as one "
                "process. Choose a batch that does not depend on the number of ranks: one replica over all ranks, or "
                "a number of samples that any number of ranks divides."
            )
        if content["objects"].keys() != self._objects.keys():
            raise CheckpointError(
                f"the job was saved with the objects {sorted(content['objects'])}, but handle.elastic was given "
                f"{sorted(self._objects)}. Give it objects with the same names."
            )
        self._with_frozen = content["frozen"] is None
        saved_sums: dict[tuple[str, bool], float] = {}
        for content_of_rank in newest.contents:
            saved_sums |= content_of_rank["frozen"] or {}
        has_other_parameters = False
        for (name, is_part), value in self._frozen.sums.items():
            # Parts are not compared: with another number of ranks, a rank holds another part of a parameter.
            if not is_part and saved_sums.get((name, is_part), value) != value:
                has_other_parameters = True
        if self._is_on_any_rank(has_other_parameters):
            raise CheckpointError(
                "the frozen parameters are not those with which the job was begun, and saves do not include them. Make "
                "the same ones at every start: load them, or set a seed before they are made."
            )
        parts: dict[str, Any] = {}
        for content_of_rank in newest.contents:
            parts |= content_of_rank["parts"]
        load_parts(engine, parts, with_frozen=self._with_frozen)
        for name, obj in self._objects.items():
            obj.load_state_dict(content["objects"][name])
        if self.losses is not None and content.get("losses") is not None:
            self.losses.load_state_dict(content["losses"])
        set_process_states(content["random"])
        if content["device_random"] is not None and get_accelerator().device_name() != "cpu":
            get_accelerator().set_rng_state(content["device_random"])

    def _report_start(self, newest: LoadedSave | None) -> None:
        """Report that the job begins, or resumes from a save, as an event."""
        seconds = {"prepared_s": round(time.perf_counter() - self._begin_s, 3)}
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # events of earlier rounds, as far as this agent has them
                self.events += self._worker.ask_rendezvous({"do": "status"})["events"]
        if newest is None:
            self._say("begin", round=self._worker.round_number, **seconds)
            return
        former_workers = newest.contents[0]["workers"]
        changes = {
            "gone": [name for name in former_workers if name not in self._workers],
            "new": [name for name in self._workers if name not in former_workers],
        }
        self._say(
            "resume",
            round=self._worker.round_number,
            step=newest.save.step,
            ranks=f"{newest.save.world_size} -> {dist.get_world_size()}",
            **{name: workers for name, workers in changes.items() if workers},
            fetched_bytes=newest.fetched_bytes,
            found_s=round(newest.seconds, 3),
            **seconds,
        )

    def _say(self, kind: str, **details: object) -> None:
        """Report an event on rank 0: announce it, write it to DeepSpeed's monitor, and send it to the agent.

        Args:
            kind: of the event, such as "resume".
            details: values by name.
        """
        if dist.get_rank() != 0:
            return
        announce(f"elastic: {kind}, {', '.join(f'{name} {value}' for name, value in details.items())}")
        event = {"kind": kind, "time": time.time(), "ranks": dist.get_world_size(), **details}
        self.events.append(json.loads(json.dumps(event, default=str)))
        engine = self._engine_ref()
        if engine is not None and engine.monitor.enabled:
            group = f"Heterogeneity/elastic/{kind.replace(' ', '_')}"
            entries = []
            for name, value in event.items():
                if name != "time" and isinstance(value, int | float):
                    entries.append((f"{group}/{name}", float(value), engine.global_samples))
            engine.monitor.write_events(entries)
        with contextlib.suppress(OSError):  # an agent that is gone; the event was announced above
            self._worker.ask_rendezvous({"do": "event", "event": self.events[-1]})


def saved_tensors(state: object) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from saved_tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from saved_tensors(value)


ParameterDescription = tuple[str, tuple[int, ...], str, bool]
"""Name of a parameter, shape of the whole parameter, its dtype, and whether it is trained."""


def describe_parameters(model: torch.nn.Module) -> list[ParameterDescription]:
    """Describe all parameters of a model; those of ZeRO-3 with the shapes of the whole parameters."""
    descriptions = []
    for name, parameter in model.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        descriptions.append((name, shape, str(parameter.dtype), parameter.requires_grad))
    return descriptions


def prepare(engine: Any, start: JobStart, stages: list[ParameterDescription] | None = None) -> ElasticEngine | None:
    """Return the object that saves and restores an engine's state, if the job is elastic; else None.

    Args:
        engine: DeepSpeed's engine.
        start: what the ranks agreed on for the job.
        stages: parameters of the whole model, if each rank holds a stage of it.

    Caller: every rank.

    Raises:
        ConfigError: on every rank: the engine's state cannot be saved, or ``"elastic"`` is set without a launcher that
            starts ranks again.
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
    if stages is None and (len(start.plan.pipelines) > 1 or section.sets_batch_by_rank):
        refuse_other_engines("a plan of several replicas, whose global batch would change with the number of ranks,")
    if _latest is not None and _latest() is not None:
        raise ConfigError(
            "an elastic job trains one engine, but this process has made a second one. Start the job without --elastic."
        )
    elastic_engine = ElasticEngine(engine, worker, start, stages)
    _latest = weakref.ref(elastic_engine)
    return elastic_engine


def refuse_other_engines(kind: str) -> None:
    """Raise `ConfigError` if the job is elastic, because elastic jobs do not save the state of this kind of engine.

    Args:
        kind: the noun for the engine, for the message.
    """
    if own_worker() is not None:
        raise ConfigError(
            f"{kind} cannot be kept by an elastic job yet: it would begin anew after a fault. Start it without "
            "--elastic."
        )


def _expect_supported(engine: Any) -> None:
    """Check that the state of an engine can be saved. Raises `ConfigError`: it names the setting that prevents it."""
    stage = engine.zero_optimization_stage()
    offload = engine.zero_offload_optimizer(), engine.zero_offload_param()
    is_used_by_feature = {
        "offloading to NVMe": any(part is not None and str(part.device).endswith("nvme") for part in offload),
        "ZeRO-3 with hpZ": engine.zero_hpz_partition_size() > 1,
        "DeepSpeed's mixtures of experts": engine.has_moe_layers,
        "universal checkpoints": engine.load_universal_checkpoint(),
        "ZeRO-0 in bf16 or fp16": stage == 0 and (engine.bfloat16_enabled() or engine.fp16_enabled()),
        "an engine without an optimizer": engine.optimizer is None,
    }
    for feature, is_used in is_used_by_feature.items():
        if is_used:
            raise ConfigError(f"{feature} cannot be kept by an elastic job yet. Start it without --elastic.")


def _fingerprint(engine: Any, stages: list[ParameterDescription] | None) -> str:
    """Return a hash of the ZeRO stage and of all parameters' descriptions. A save and a job must have the same hash."""
    zero_stage = engine.zero_optimization_stage() if stages is None else "pipelines"
    descriptions = describe_parameters(engine.module) if stages is None else stages
    return hashlib.sha256(repr((zero_stage, descriptions)).encode()).hexdigest()[:16]
