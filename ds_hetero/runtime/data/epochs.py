"""Read the epochs of a wrapped loader; the first may resume in the middle, where an earlier job stopped.

When an epoch begins, a loader draws random numbers (a permutation, the seeds of its workers). A resumed epoch draws
them again from saved states: of the generators of the loader and its sampler, of the process's generators where these
have none, and of the counters by which samplers count their epochs. Batches that are read again are compared with the
batches that were trained on. So a resumed epoch has the batches of an uninterrupted run, or is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from ds_hetero.errors import BatchError, SamplingError
from ds_hetero.runtime.data.loader_names import LoaderNames
from ds_hetero.runtime.data.random_states import (
    drawing_from,
    generators_of,
    get_state,
    process_states,
    set_process_states,
    set_state,
)
from ds_hetero.runtime.data.shards import Batch, Entries, shard_fingerprint

STATE_VERSION = 2  # of the format of the states that loaders save


class _Resumed(NamedTuple):
    """Arguments of `Epochs.resume`: the position at which an epoch is begun again."""

    state: Batch
    num_dropped: int
    num_again: int
    generators: Batch


class Epochs:
    """Reads the epochs of one loader.

    Args:
        names: attributes by which the loader's parts are found.
        compares: whether the loader reads whole epochs, so that a resumed one can be compared with the batches before.
    """

    def __init__(self, dataloader: Any, names: LoaderNames, *, compares: bool = True) -> None:
        self.dataloader, self._names, self._compares = dataloader, names, compares
        self.checksum: int | None = 0  # of the batches read in the latest epoch; None where they are not compared
        self.is_under_way = False  # whether an epoch was begun and has not ended yet
        self._first_counters = self._counters()
        self._start: Entries | None = None  # with which the latest epoch began
        self._resumed: _Resumed | None = None  # what `resume` was given, until the epoch is begun

    def read(self) -> Iterator[Any]:
        """Yield the batches of the next epoch. Raises `SamplingError`: a resumed one differs from the epoch before."""
        resumed, self._resumed = self._resumed, None
        self.checksum, self.is_under_way = 0 if self._compares else None, True
        if resumed is None:
            if self._start is None and self._names.wraps_state(self.dataloader):
                # accelerate's loader has begun this epoch already, to have a state: set it back to that state.
                self.dataloader.load_state_dict(self.dataloader.state_dict())
            self._start = self.states_now()
            batches = iter(self.dataloader)
        else:
            with drawing_from(resumed.state["process"]):
                batches = self._begin_again(resumed)
        for batch in batches:
            self._update_checksum(batch)
            yield batch
        self.is_under_way = False

    @contextmanager
    def drawing_nothing(self) -> Iterator[None]:
        """Restore the random states of the process and of the loader's generators afterwards."""
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
        """Return the state from which `resume` draws an epoch again, and ``checksum`` in it.

        Args:
            amid_epoch: the state is that of the present epoch; otherwise it is that of the next one.
            checksum: checksum of the epoch's batches so far; None if they are not compared.
        """
        start = self._start if amid_epoch else None
        return {**(start or {**self._loader_states(), "process": {}}), "checksum": checksum}

    def resume(self, state: Batch, num_dropped: int, num_again: int, generators: Batch | None = None) -> None:
        """Begin the next epoch with ``state``.

        Args:
            state: from `state`.
            num_dropped: number of batches that the earlier job used; they are read again and dropped.
            num_again: number of batches behind these that the earlier job read, but did not use; they are read and
                used.
            generators: from `generator_states`, set after these reads, for a loader that resumes by its own state.
        """
        self._set_loader_states(state)
        self._start = {name: state[name] for name in ("generators", "counters", "process")}
        self._resumed = _Resumed(state, num_dropped, num_again, generators or {}) if state["process"] else None
        self.checksum = state["checksum"]

    def states_now(self) -> Entries:
        """Return the states from which an epoch that begins now is drawn, for `put_back`."""
        return {**self._loader_states(), "process": process_states()}

    def put_back(self, start: Batch) -> None:
        """Restore ``start`` from `states_now`, so that the next epoch draws the same again."""
        self._set_loader_states(start)
        set_process_states(start["process"])

    def _set_loader_states(self, state: Batch) -> None:
        self._set_generators(state["generators"])
        for part in self._counting_parts():
            for name, value in state["counters"].get(type(part).__name__, {}).items():
                setattr(part, name, value)

    def _begin_again(self, resumed: _Resumed) -> Iterator[Any]:
        """Read the batches of the earlier job again; return an iterator over the batches to use, and all that follow.

        The caller has set the random states of the process for the time of this call. Most loaders draw random numbers
        when their first batch is read, so at least one batch is read here.
        """
        batches = iter(self.dataloader)
        for batch in islice(batches, resumed.num_dropped):
            self._update_checksum(batch)
        if resumed.num_dropped:
            expect_same_checksum(self.checksum, resumed.state["checksum"], f"{resumed.num_dropped} batches")
        num_read_now = resumed.num_again if resumed.num_dropped else max(resumed.num_again, 1)
        read_now = list(islice(batches, num_read_now))
        self._set_generators(resumed.generators)
        return chain(read_now, batches)

    def _update_checksum(self, batch: Any) -> None:
        self.checksum = None if self.checksum is None else add_to_checksum(self.checksum, batch)

    def _loader_states(self) -> Entries:
        """Return the states of the loader's generators, and its counters of epochs: see `_is_saved_counter`."""
        counters = {
            kind: {name: value for name, value in numbers.items() if self._is_saved_counter(kind, name, value)}
            for kind, numbers in self._counters().items()
        }
        return {
            "generators": self.generator_states(),
            "counters": {kind: numbers for kind, numbers in counters.items() if numbers},
        }

    def _is_saved_counter(self, kind: str, name: str, value: int) -> bool:
        """Whether a whole number of an object of class ``kind`` is a seed, or has changed since the loader was made."""
        return "seed" in name or self._first_counters.get(kind, {}).get(name) != value

    def _parts(self) -> Iterator[Any]:
        return self._names.parts(self.dataloader)

    def _counters(self) -> dict[str, dict[str, int]]:
        """Return the attributes of loaders and samplers that are whole numbers, by class and attribute name."""
        return {
            type(part).__name__: {name: value for name, value in vars(part).items() if type(value) is int}
            for part in self._counting_parts()
        }

    def _counting_parts(self) -> list[Any]:
        """Return the parts that may count epochs: loaders, samplers, and whatever has ``set_epoch``."""
        return [part for part in self._parts() if isinstance(part, Sampler | DataLoader) or hasattr(part, "set_epoch")]


def expect_compatible(state: Batch, current: Batch) -> None:
    """Raise `BatchError` if the settings in a loader's ``state`` differ from the ``current`` settings."""
    saved = {name: state.get(name) for name in current}
    if saved != current:
        raise BatchError(
            f"a loader saved with {saved} cannot resume with {dict(current)} in the middle of an epoch. "
            "Resume with as many ranks per replica, or the same global batch, and the same loader; or begin the "
            "epoch anew."
        )


def add_to_checksum(checksum: int, batch: Any) -> int:
    """Return the checksum of the batches so far and ``batch``, from the ``checksum`` of the batches so far."""
    return zlib.crc32("".join(_texts(batch)).encode(), checksum)


def expect_same_checksum(read: int | None, expected: int | None, what: str) -> None:
    """Refuse a resumed epoch whose first batches have another checksum than before, if both are known.

    Args:
        read: checksum of the batches that the loader gives now.
        expected: checksum of the batches that the loader gave before the checkpoint.
        what: number and noun of the compared items for the message, such as "12 batches".

    Raises:
        SamplingError: the checksums differ.
    """
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
    """Yield texts that stand for the content of a batch: names, fingerprints of tensors, numbers."""
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
