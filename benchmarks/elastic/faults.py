"""Strike an elastic job with faults chosen by seed, and judge how it continues."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.elastic import loops, trainer, training
from benchmarks.elastic.nodes import Cluster, Event, Node
from ds_hetero.elastic.node.node_server_requests import ask
from ds_hetero.elastic.node.place import token_of

KINDS = ("worker", "node", "agent", "node_server", "fork_server", "stop", "freeze", "cut", "notice")
PHASES = ("step", "save", "copy", "meet", "connect", "build", "load")
_BEGINS = {"connect": "spawn", "build": "init", "load": "built"}  # the first such event of a restart begins a phase
_LOSES_NODE = ("node", "notice", "freeze", "cut")
_START_LIMIT_S = 180.0
_PHASE_LIMIT_S = 60.0
_LOOK_S = 0.0002  # at a save, which lasts for milliseconds
_MIN_STEPS_ALONE = 300  # steps

_alone: dict[tuple[str, bool], list[dict[str, float]]] = {}  # numbers of training in one process, for all jobs
_training_alone = threading.Lock()


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        phase: "step" at any time of a step; "save" and "copy" while a save is written; the others are phases of a
            restart, which is caused by killing a worker before.
    """

    kind: str
    phase: str
    node: Node


class FaultRun:
    """One job and its faults.

    Args:
        cluster: its nodes.
        draw: chooses faults.
        every: steps between two saves.
        limit_s: seconds that a fault may take.
    """

    def __init__(self, cluster: Cluster, draw: random.Random, every: int, limit_s: float) -> None:
        self._cluster, self._draw, self._every, self._limit_s = cluster, draw, every, limit_s
        self._reference: list[dict[str, float]] = []
        self._num_judged = 0  # of the steps of all ranks so far

    def run(self, num_faults: int, kinds: tuple[str, ...], phases: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Strike the job with one fault after the other; yield a line for each, and end after the first hang."""
        if not self.start():
            yield {"fault": "start", "phase": "start", "hang": 1, "status": self._status()}
            return
        for _ in range(num_faults):
            time.sleep(self._draw.uniform(0.1, 2.0))
            line = self.give(self._choose(kinds, phases))
            yield line
            if line["hang"]:
                return

    def start(self) -> bool:
        """Start all nodes; return whether they train."""
        self._cluster.start()
        return self._cluster.wait_for(lambda events: _last_step(events) >= 2, max(_START_LIMIT_S, self._limit_s))

    def _choose(self, kinds: tuple[str, ...], phases: tuple[str, ...]) -> Fault:
        """Choose a fault that is possible now."""
        nodes, draw = self._cluster.nodes, self._draw
        up, down = [node for node in nodes if node.is_up], [node for node in nodes if not node.is_up]
        if down and (len(up) == 1 or self._cluster.keeps_majority or draw.random() < 0.5):
            return Fault("join", "step", draw.choice(down))
        kind, node = draw.choice([(kind, node) for kind in kinds for node in up if self._is_possible(kind, node)])
        return Fault(kind, draw.choice(phases), node)

    def _is_possible(self, kind: str, node: Node) -> bool:
        """Return whether a node can have a fault of this kind now."""
        cluster = self._cluster
        if kind == "fork_server":
            return cluster.warm_socket is None
        if kind == "cut" and cluster.network is None:
            return False
        num_remaining = cluster.num_workers - node.workers
        return kind not in _LOSES_NODE or (
            2 * num_remaining > cluster.num_workers if cluster.keeps_majority else num_remaining > 0
        )

    def give(self, fault: Fault) -> dict[str, Any]:
        """Strike the job with one fault, and judge how it continued."""
        cluster = self._cluster
        line = {"fault": fault.kind, "phase": fault.phase, "node": fault.node.name}
        began_s = time.time()
        if fault.phase in ("save", "copy"):
            _wait_for_save(fault)
        elif fault.phase != "step":
            others = [node for node in cluster.nodes if node.is_up and node.worker_pids()]
            _kill(self._draw.choice(self._draw.choice(others).worker_pids()))
            self._wait_for_phase(fault.phase, began_s)
        done_s = time.time()
        expected = self._do(fault)
        if fault.kind == "node_server":  # nobody has to notice
            last = _last_step(cluster.events())
            is_back = cluster.wait_for(lambda events: _last_step(events) >= last + 2 * self._every, self._limit_s)
            is_back = is_back and bool(fault.node.children("node_server"))
        else:
            is_back = cluster.wait_for(lambda events: has_continued(events, done_s, expected), self._limit_s)
        if fault.kind in ("freeze", "cut"):
            mended_s = time.time()
            self._mend(fault)
            is_back = is_back and cluster.wait_for(
                lambda events: has_continued(events, mended_s, cluster.num_workers), self._limit_s
            )
        line = {**line, "ranks": cluster.num_workers, "hang": int(not is_back)}
        return {**line, **self.judge(began_s, done_s)} if is_back else {**line, "status": self._status()}

    def _wait_for_phase(self, phase: str, began_s: float) -> None:
        """Wait until a restart is in a phase, and a random moment longer."""
        if (name := _BEGINS.get(phase)) is not None:
            self._cluster.wait_for(
                lambda events: any(e["event"] == name and e["time"] > began_s for e in reversed(events)), _PHASE_LIMIT_S
            )
        time.sleep(self._draw.uniform(0.0, 1.0 if phase == "meet" else 0.2))

    def _do(self, fault: Fault) -> int:
        """Execute the fault; return the ranks with which the job is expected to continue."""
        cluster, node = self._cluster, fault.node
        if fault.kind == "join":
            node.start()
        elif fault.kind == "node":
            node.die()
        elif fault.kind == "notice":
            node.leave()
        elif fault.kind == "freeze":
            node.signal_all(signal.SIGSTOP)
            return cluster.num_workers - node.workers
        elif fault.kind == "cut":
            assert cluster.network is not None
            cluster.network.cut(node.number)
            return cluster.num_workers - node.workers
        else:
            pids = node.worker_pids() if fault.kind in ("worker", "stop") else node.children(fault.kind)
            if pids:  # it may have died of the fault before
                _kill(self._draw.choice(pids), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        return cluster.num_workers

    def _mend(self, fault: Fault) -> None:
        if fault.kind == "freeze":
            fault.node.signal_all(signal.SIGCONT)
        else:
            assert self._cluster.network is not None
            self._cluster.network.mend(fault.node.number)

    def judge(self, began_s: float, done_s: float) -> dict[str, Any]:
        """Return the steps lost, the differences from one process, and the seconds of each phase."""
        events = self._cluster.events()
        steps = [event for event in events if event["event"] in ("step", "log")]
        ready = [event for event in events if event["event"] == "ready" and event["time"] > began_s]
        lost = 0
        if ready:
            before = max((event["step"] for event in steps if event["time"] < ready[-1]["time"]), default=0)
            lost = max(0, before - ready[-1]["step"])
        self._reference = self._train_alone(_last_step(events))
        after, self._num_judged = steps[self._num_judged :], len(steps)
        # A step that was saved, and killed before it was logged, is seen in the next one's numbers.
        saved = {event["step"] for event in events if event["event"] == "ready"}
        missing = set(range(1, _last_step(events) + 1)) - {event["step"] for event in steps} - saved
        return {
            "lost_steps": lost,
            "steps_missing": len(missing),
            "steps": sum(event["event"] == "step" for event in after),
            "loss_difference": max(self._worst(after, name) for name in ("loss", "logged", *trainer.TOKEN_METRICS)),
            "norm_difference": self._worst(after, "norm"),
            "parameter_difference": self._worst(after, "parameters"),
            "seconds": phases_of(events, done_s),
        }

    def _train_alone(self, num_steps: int) -> list[dict[str, float]]:
        """Return the numbers of the same training in one process, of ``num_steps`` or more steps."""
        arguments = self._cluster.arguments
        key = arguments[arguments.index("--loop") + 1] if "--loop" in arguments else "own", "--lora" in arguments
        with _training_alone:
            if len(_alone.get(key, ())) < num_steps:
                _alone[key] = _train_alone(*key, max(2 * num_steps, _MIN_STEPS_ALONE))
            return _alone[key]

    def _worst(self, steps: list[Event], name: str) -> float:
        pairs = [(step[name], self._reference[step["step"] - 1][name]) for step in steps if name in step]
        return max((abs(ours - theirs) / max(abs(theirs), 1e-12) for ours, theirs in pairs), default=0.0)

    def _status(self) -> dict[str, Any]:
        """Return the status of the agents, to explain a hang."""
        status_by_node: dict[str, Any] = {}
        for node in self._cluster.nodes:
            address = node.place.address()
            if address is None or self._cluster.network is not None:
                continue
            with contextlib.suppress(OSError):
                answer = ask(address, token_of(self._cluster.job, self._cluster.environment), {"do": "status"}, 3.0)
                status_by_node[node.name] = {
                    key: answer[key] for key in ("round", "members", "is_broken", "newcomers", "closed")
                }
        return status_by_node


def _train_alone(loop: str, is_lora: bool, num_steps: int) -> list[dict[str, float]]:
    if loop.startswith("trainer") or loop == "sft":
        return trainer.train_alone(num_steps, loop)
    if loop == "accelerate":
        return loops.train_alone(num_steps)
    shape = {"layers": loops.LAYERS, "batch_size": loops.GLOBAL} if loop == "pipelines" else {}
    return training.train_alone(num_steps, is_lora=is_lora, **shape)


def _wait_for_save(fault: Fault) -> None:
    """Wait, for a short while, until a save of the node is being written, here or as a copy; it takes milliseconds."""
    end_s = time.monotonic() + _PHASE_LIMIT_S
    while time.monotonic() < end_s:
        is_copy = [path.name.startswith("from-") for path in fault.node.dirty_segments()]
        if (fault.phase == "copy") in is_copy:
            return
        time.sleep(_LOOK_S)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _last_step(events: list[Event]) -> int:
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


def has_continued(events: list[Event], began_s: float, ranks: int) -> bool:
    """Return whether a world of ``ranks`` ranks was ready after the fault, and has done a step."""
    ready = [e["time"] for e in events if e["event"] == "ready" and e["world_size"] == ranks and e["time"] > began_s]
    return any(
        e["event"] == "step" and e["world_size"] == ranks and ready and e["time"] > ready[0] for e in reversed(events)
    )


def phases_of(events: list[Event], began_s: float) -> dict[str, float]:
    """Return the seconds of each phase of the last restart, between the last rank's arrivals."""
    after = [event for event in events if event["time"] > began_s]
    ends: dict[str, float] = {}
    for name in ("spawn", "init", "built", "ready"):
        times = [event["time"] for event in after if event["event"] == name]
        if not times:
            return {}
        ends[name] = max(times)
    first_step_s = min((e["time"] for e in after if e["event"] == "step" and e["time"] > ends["ready"]), default=None)
    if first_step_s is None:
        return {}
    marks = [began_s, *ends.values(), first_step_s]
    names = ("end_and_meet", "connect", "build", "load", "step")
    phases = {name: round(b - a, 2) for name, a, b in zip(names, marks, marks[1:], strict=False)}
    return {**phases, "all": round(first_step_s - began_s, 2)}
