"""Feed mutations of one kind of input to its reader, in this process."""

from __future__ import annotations

import copy
import json
import random
import signal
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz.kinds import Kind, Nonsense
from benchmarks.fuzz.mutations import mutate, places, tear
from ds_hetero.common.reading import parse
from ds_hetero.errors import ConfigError, HeteroError

CPU_LIMIT_S = 5.0
LONGEST_MESSAGE = 3_000  # characters


class Hang(BaseException):
    """A reader took more than `CPU_LIMIT_S` of CPU time."""


@dataclass
class Tally:
    """Outcomes of the mutations of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    single: int = 0
    named: int = 0
    faults: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every mutation ended in a clear error or a valid value."""
        return not self.faults

    def count_named(self, message: str, names: Sequence[str]) -> None:
        """Count a clear error after a single mutation, by whether its message has one of the mutated keys."""
        self.single += 1
        if names_one_of(message, names):
            self.named += 1
        else:
            self.unnamed.append(f"{names[0][:40]}: {message.strip()[:300]}")


def fuzz(kind: Kind, count: int, rng: random.Random) -> Tally:
    """Read ``count`` mutations of a kind's example."""
    tally = Tally()
    for _ in range(count):
        content, names = copy.deepcopy(kind.example), ()
        as_object = rng.random() < 0.4 and kind.names_keys
        changes = rng.choice((1, 1, 1, 2, 3))
        for _ in range(changes):
            if any(places(content)) and isinstance(content, (dict, list)) and content:
                content, names = mutate(content, rng, as_object)
        input_value: Any = content
        if not as_object:
            try:
                input_value = json.dumps(content)
            except RecursionError:
                input_value = "[" * 100_000
            if rng.random() < 0.15:
                input_value, names = tear(input_value, rng), ()
        outcome, message = _outcome(kind, input_value)
        tally.outcomes[outcome] += 1
        if outcome in ("traceback", "hang", "nonsense"):
            tally.faults.append(f"{message}\n  of {repr(input_value)[:300]}")
        if outcome == "clear error" and changes == 1 and names and kind.names_keys:
            tally.count_named(message, names)
    return tally


def names_one_of(message: str, names: Sequence[str]) -> bool:
    """Return whether a message has one of these keys, as it is or escaped."""
    return any(name in message or ascii(name)[1:-1] in message for name in names)


def _outcome(kind: Kind, input_value: Any) -> tuple[str, str]:
    try:
        with _cpu_limit(CPU_LIMIT_S):
            if isinstance(input_value, str) and kind.names_keys:
                input_value = parse(input_value, "input", ConfigError)
            kind.read(input_value)
    except HeteroError as error:
        return (
            ("clear error", str(error)) if len(str(error)) < LONGEST_MESSAGE else ("traceback", "a message without end")
        )
    except Hang:
        return "hang", f"more than {CPU_LIMIT_S} s of CPU time"
    except Nonsense as error:
        return "nonsense", f"nonsense: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "traceback", f"{type(error).__name__}: {str(error)[:200]} at {Path(frame.filename).name}:{frame.lineno}"
    return "accepted", ""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
