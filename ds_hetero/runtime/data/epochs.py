"""The epochs of a wrapped loader, of which the first may begin in the middle, as an earlier job left it.

What a loader draws when an epoch begins (a permutation, the seeds of its workers) is drawn again from the same states:
those of the generators that the loader and its sampler hold, those of the process where they hold none, and the numbers
by which samplers count their epochs. Batches that are read again are compared with those that were trained on. So a
resumed epoch has the batches of one run, or is refused.

The states of what draws random numbers: of the process, and of the objects that hold generators of their own.

A state is of lists, numbers and dicts, so that it goes into any file.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from ds_hetero.errors import BatchError, SamplingError
from ds_hetero.runtime.data.batch_mode import LoaderNames
from ds_hetero.runtime.data.shards import Batch, Entries, shard_fingerprint

STATE_VERSION = 2  # of what loaders save


class _Resumed(NamedTuple):
    """Position at which an epoch is to be begun again; see `Epochs.resume`."""

    state: Batch
    num_dropped: int
    num_again: int
    generators: Batch


class Epochs:
    """Reads the epochs of one loader.

    Args:
        names: by which it shows its parts.
        compares: whether an epoch of this loader is a whole one, whose batches a resumed one can be compared with.
    """

    def __init__(self, dataloader: Any, names: LoaderNames, *, compares: bool = True) -> None:
        self.dataloader, self._names, self._compares = dataloader, names, compares
        self.checksum: int | None = 0  # of the batches read in the latest epoch; None where they are not compared
        self.is_under_way = False  # whether an epoch was begun that has not come to its end
        self._first_counters = self._counters()
        self._start: Entries | None = None  # with which the latest epoch began
        self._resumed: _Resumed | None = None  # what `resume` was given, until the epoch is begun

    def read(self) -> Iterator[Any]:
        """Yield the batches of the next epoch. Raises `BatchError`: they are others than those trained on."""
        resumed, self._resumed = self._resumed, None
        self.checksum, self.is_under_way = 0 if self._compares else None, True
        if resumed is None:
            if self._start is None and self._names.wraps_state(self.dataloader):
                # accelerate's has begun this epoch already, for the sake of its state.
                self.dataloader.load_state_dict(self.dataloader.state_dict())
            self._start = self.states_now()
            batches = iter(self.dataloader)
        else:
            with drawing_from(resumed.state["process"]):
                batches = self._begin_again(resumed)
        for batch in batches:
            self._add(batch)
            yield batch
        self.is_under_way = False

    @contextmanager
    def drawing_nothing(self) -> Iterator[None]:
        """Put back the random states of the process and of the loader's generators: draws inside count nothing."""
        states = self.generator_states()
        with drawing_from(process_states()):
            yield
        self._set_generators(states)

    def generator_states(self) -> Entries:
        """Return the states of the generators that the loader and its parts hold, by class and attribute."""
        return {name: get_state(generator) for name, generator in generators_of(self._parts()).items()}

    def _set_generators(self, states: Batch) -> None:
        generators = generators_of(self._parts())
        for name in states.keys() & generators.keys():
            set_state(generators[name], states[name])

    def state(self, *, amid_epoch: bool, checksum: int | None) -> Entries:
        """State for `resume`: of this epoch, with its ``checksum``, if it is to be resumed amid it, or of the next."""
        start = self._start if amid_epoch else None
        return {**(start or {**self._own_states(), "process": {}}), "checksum": checksum}

    def resume(self, state: Batch, num_dropped: int, num_again: int, generators: Batch | None = None) -> None:
        """Begin the next epoch with ``state``.

        Args:
            state: from `state`.
            num_dropped: batches that were used, and are read and dropped.
            num_again: batches after those that were read too, and are to be used.
            generators: from `generator_states`, where a loader that goes on by its own state does not draw as before.
        """
        self._set_own_states(state)
        self._start = {name: state[name] for name in ("generators", "counters", "process")}
        self._resumed = _Resumed(state, num_dropped, num_again, generators or {}) if state["process"] else None
        self.checksum = state["checksum"]

    def states_now(self) -> Entries:
        """Return the states from which an epoch that begins now is drawn, for `put_back`."""
        return {**self._own_states(), "process": process_states()}

    def put_back(self, start: Batch) -> None:
        """Let the next epoch draw as the one before which `states_now` returned ``start``."""
        self._set_own_states(start)
        set_process_states(start["process"])

    def _set_own_states(self, state: Batch) -> None:
        self._set_generators(state["generators"])
        for part in self._counting_parts():
            for name, value in state["counters"].get(type(part).__name__, {}).items():
                setattr(part, name, value)

    def _begin_again(self, resumed: _Resumed) -> Iterator[Any]:
        """Draw and read inside what was drawn and read before; most loaders draw with their first batch."""
        batches = iter(self.dataloader)
        for batch in islice(batches, resumed.num_dropped):
            self._add(batch)
        if resumed.num_dropped:
            expect_same_checksum(self.checksum, resumed.state["checksum"], f"{resumed.num_dropped} batches")
        num_inside = resumed.num_again if resumed.num_dropped else max(resumed.num_again, 1)
        inside = list(islice(batches, num_inside))
        self._set_generators(resumed.generators)
        return chain(inside, batches)

    def _add(self, batch: Any) -> None:
        self.checksum = None if self.checksum is None else add_to_checksum(self.checksum, batch)

    def _own_states(self) -> Entries:
        counters = {
            kind: {name: value for name, value in numbers.items() if self._moves(kind, name, value)}
            for kind, numbers in self._counters().items()
        }
        return {
            "generators": self.generator_states(),
            "counters": {kind: numbers for kind, numbers in counters.items() if numbers},
        }

    def _moves(self, kind: str, name: str, value: int) -> bool:
        return "seed" in name or self._first_counters.get(kind, {}).get(name) != value

    def _parts(self) -> Iterator[Any]:
        return self._names.parts(self.dataloader)

    def _counters(self) -> dict[str, dict[str, int]]:
        """Return the whole numbers of loaders and samplers, by class and attribute."""
        return {
            type(part).__name__: {name: value for name, value in vars(part).items() if type(value) is int}
            for part in self._counting_parts()
        }

    def _counting_parts(self) -> list[Any]:
        return [part for part in self._parts() if isinstance(part, Sampler | DataLoader) or hasattr(part, "set_epoch")]


def expect_compatible(state: Batch, current: Batch) -> None:
    """Refuse a loader's ``state`` that was taken under other conditions than the ``current``. Raises `BatchError`."""
    saved = {name: state.get(name) for name in current}
    if saved != current:
        raise BatchError(
            f"a loader saved with {saved} cannot resume with {dict(current)} in the middle of an epoch. "
            "Resume with as many ranks per replica, or the same global batch, and the same loader; or begin the "
            "epoch anew."
        )


def add_to_checksum(checksum: int, batch: Any) -> int:
    """Return the checksum of all that was read, with one batch more."""
    return zlib.crc32("".join(_texts(batch)).encode(), checksum)


def expect_same_checksum(read: int | None, expected: int | None, what: str) -> None:
    """Refuse what a loader has given again with another checksum, if both are known. Raises `SamplingError`."""
    if read is not None and expected is not None and read != expected:
        raise SamplingError(
            f"the loader does not give again what it gave before the checkpoint: the first {what} of the epoch have "
            f"the checksum {read:08x}, they had {expected:08x}. The rest of the epoch would not be that of one run. "
            "Give the loader the data, batch size and sampler that it had. Where a sampler, a dataset or a collate "
            "function draws random numbers for every batch, give it a generator of its own "
            "(torch.Generator, random.Random) as an attribute, let the loader have num_workers=1, or use torchdata's "
            "StatefulDataLoader. Or begin the epoch anew: leave load_state_dict out."
        )


def _texts(entry: Any) -> Iterator[str]:
    if isinstance(entry, Tensor):
        yield shard_fingerprint(entry)
    elif isinstance(entry, Mapping):
        for name in sorted(entry, key=str):
            yield str(name)
            yield from _texts(entry[name])
    elif isinstance(entry, list | tuple):
        for part in entry:
            yield from _texts(part)
    elif isinstance(entry, str | bytes | int | float):
        yield repr(entry)
    else:
        yield type(entry).__name__


_OF_PROCESS: Batch = {"torch": torch.default_generator, "python": random, "numpy": np.random}
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def get_state(generator: Any) -> Any:
    """The state of a generator of torch, numpy or Python, or of the one that their module keeps for the process."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if hasattr(generator, "getstate"):
        version, numbers, of_gauss = generator.getstate()
        return [version, list(numbers), of_gauss]
    return _plain(generator.get_state(legacy=False))


def set_state(generator: Any, state: Any) -> None:
    """Put back what `get_state` returned for a generator of the same kind."""
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
    """Put back what `process_states` returned."""
    for name, state in states.items():
        set_state(_OF_PROCESS[name], state)


@contextmanager
def drawing_from(states: Batch) -> Iterator[None]:
    """Draw from ``states`` of the process inside, and afterwards as if nothing had been drawn there."""
    outside = process_states()
    set_process_states(states)
    try:
        yield
    finally:
        set_process_states(outside)


def generators_of(parts: Iterable[Any]) -> Entries:
    """Return the generators that ``parts`` hold as attributes, each once, by class and attribute."""
    generators: Entries = {}
    seen: set[int] = set()
    for part in parts:
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, _GENERATORS) and id(value) not in seen:
                seen.add(id(value))
                generators[f"{type(part).__name__}.{name}"] = value
    return generators


def _plain(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, tuple) else state
