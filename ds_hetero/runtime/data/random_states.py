"""Save and restore the states of random number generators, of the process and of objects.

A state consists of lists, numbers and dicts, so that any file format can hold it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ds_hetero.runtime.data.shards import Batch, Entries

_OF_PROCESS: Batch = {"torch": torch.default_generator, "python": random, "numpy": np.random}
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def get_state(generator: Any) -> Any:
    """Return the state of a generator; the modules ``random`` and ``np.random`` stand for the process's generators."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if hasattr(generator, "getstate"):
        version, numbers, of_gauss = generator.getstate()
        return [version, list(numbers), of_gauss]
    return _plain(generator.get_state(legacy=False))


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a ``state`` that `get_state` returned for a generator of the same kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        version, numbers, of_gauss = state
        generator.setstate((version, tuple(numbers), of_gauss))
    else:
        generator.set_state(state)


def process_states() -> Entries:
    """Return the states of the generators that torch (on the CPU), Python and numpy keep for this process."""
    return {name: get_state(generator) for name, generator in _OF_PROCESS.items()}


def set_process_states(states: Batch) -> None:
    """Set the generators of this process to ``states`` from `process_states`."""
    for name, state in states.items():
        set_state(_OF_PROCESS[name], state)


@contextmanager
def drawing_from(states: Batch) -> Iterator[None]:
    """Set the generators of the process to ``states`` inside, and restore their present states afterwards."""
    states_before = process_states()
    set_process_states(states)
    try:
        yield
    finally:
        set_process_states(states_before)


def generators_of(parts: Iterable[Any]) -> Entries:
    """Return the generators that ``parts`` hold as attributes, each once, keyed "class.attribute"."""
    generators: Entries = {}
    seen: set[int] = set()
    for part in parts:
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, _GENERATORS) and id(value) not in seen:
                seen.add(id(value))
                generators[f"{type(part).__name__}.{name}"] = value
    return generators


def _plain(state: Any) -> Any:
    """Return a generator's state with lists in place of arrays and tuples."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, tuple) else state
