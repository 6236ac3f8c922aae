"""The commit protocol: its rules one by one, and a model of them tried through in every order of events."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from ds_hetero.elastic.save_rules import (
    SLOTS,
    Part,
    PartCopy,
    choose_copy_nodes,
    choose_slot,
    committed_step,
    complete_saves,
    slot_bytes,
)
from ds_hetero.elastic.segments import Save


def _save(step, start="1", world=2):
    return Save(step=step, start=start, world_size=world)


def test_the_committed_save_is_never_overwritten():
    assert choose_slot({"A": _save(1), "B": None}, _save(1)) == "B"
    assert choose_slot({"A": _save(1), "B": _save(2)}, _save(2)) == "A"
    assert choose_slot({"A": None, "B": None}, None) == "A"
    assert choose_slot({"A": _save(3), "B": _save(2)}, None) == "B"  # the older one


def test_the_newest_save_with_all_parts_wins():
    here = [
        PartCopy(_save(4), 0, ("n0", "own")),
        PartCopy(_save(5), 0, ("n0", "own2")),
        PartCopy(_save(4), 1, ("n0", "copy")),
        PartCopy(_save(4), 1, ("n1", "own")),
        PartCopy(_save(5, "2"), 1, ("n1", "own2")),  # of another start
    ]
    assert complete_saves(here) == [(_save(4), {0: [("n0", "own")], 1: [("n0", "copy"), ("n1", "own")]})]
    assert complete_saves([]) == []
    assert committed_step([4, 6, 5]) == 4


def test_copies_go_to_other_nodes_with_most_room():
    parts = [Part(rank=0, node="a", num_bytes=30), Part(rank=1, node="b", num_bytes=10)]
    assert choose_copy_nodes(parts, {"a": 100, "b": 100, "c": 100}, 1) == {0: ("b",), 1: ("a",)}
    assert choose_copy_nodes(parts, {"a": 100, "b": 50, "c": 100}, 2) == {0: ("c", "b"), 1: ("a", "c")}
    assert choose_copy_nodes(parts, {"a": 100}, 1) == {0: (), 1: ("a",)}
    assert choose_copy_nodes([Part(rank=0, node="a", num_bytes=1)], {"a": 5}, 2) == {0: ()}


def test_two_slots_are_needed_of_each_own_part_and_of_each_copy():
    parts = [Part(rank=0, node="a", num_bytes=30), Part(rank=1, node="b", num_bytes=10)]
    assert slot_bytes(parts, {0: ("b",), 1: ()}) == {"a": 60, "b": 80}


# The model. A node has one rank. Files are (node, owner, slot) -> (save, content); a dirty file is absent.
WRITING, CLEAN, COPYING, DONE = range(4)


class World(NamedTuple):
    ranks: tuple[str, ...]  # by rank, the node
    start: int
    step: int  # of the save that is being made
    phases: tuple[int, ...]
    slots: tuple[str, ...]
    done: tuple[int, ...]  # newest step that was written and copied
    kept: Save | None
    files: frozenset  # of ((holder, owner, slot), save, content)
    deaths: int
    joins: int
    has_committed: bool
    is_down: bool  # somebody has died, and nobody has loaded since


def _files(world):
    return {place: (save, content) for place, save, content in world.files}


def _frozen(files):
    return frozenset((place, save, content) for place, (save, content) in files.items())


def _whole(world):
    files = _files(world)
    return complete_saves(
        PartCopy(save, content[2], (place[0], str(place))) for place, (save, content) in files.items()
    )


def _begin_save(world, copies):
    files = _files(world)
    chosen = []
    for node in world.ranks:
        own = {slot: files.get((node, node, slot), (None,))[0] for slot in SLOTS}
        chosen.append(choose_slot(own, world.kept))
        files.pop((node, node, chosen[-1]), None)
    size = len(world.ranks)
    return world._replace(
        step=world.step + 1, phases=(WRITING,) * size, slots=tuple(chosen), files=_frozen(files), is_down=False
    )


def _targets(world, rank, copies):
    parts = [Part(rank=r, node=node, num_bytes=1) for r, node in enumerate(world.ranks)]
    return choose_copy_nodes(parts, dict.fromkeys(world.ranks, 10), copies)[rank]


def _advance(world, rank, copies):
    files, node, slot = _files(world), world.ranks[rank], world.slots[rank]
    save = Save(step=world.step, start=str(world.start), world_size=len(world.ranks))
    phase, done = world.phases[rank], list(world.done)
    if phase == WRITING:
        files[node, node, slot] = (save, (world.start, world.step, rank))
    for target in _targets(world, rank, copies):
        if phase == CLEAN:
            files.pop((target, node, slot), None)
        elif phase == COPYING:
            files[target, node, slot] = files[node, node, slot]
    if phase == COPYING:
        done[rank] = world.step
    phases = list(world.phases)
    phases[rank] += 1
    return world._replace(phases=tuple(phases), files=_frozen(files), done=tuple(done))


def _commit(world, copies):
    step = committed_step(world.done)
    save = Save(step=step, start=str(world.start), world_size=len(world.ranks))
    files = {place: held for place, held in _files(world).items() if not held[0] < save or place[0] == place[1]}
    return _begin_save(world._replace(kept=save, files=_frozen(files), has_committed=True), copies)


def _load(world, ranks, copies):
    """All who are there meet, fetch every part of the newest whole save, and go on from it."""
    found = _whole(world)
    files = _files(world)
    if not found:
        assert not world.has_committed
        save, step = None, 0
    else:
        (save, parts), step = found[0], found[0][0].step
        contents = {rank: {files[eval(place)][1] for _, place in places} for rank, places in parts.items()}
        assert all(len(content) == 1 for content in contents.values())
        assert {content[:2] for of_rank in contents.values() for content in of_rank} == {(int(save.start), save.step)}
        for node in ranks:
            for rank, (content,) in contents.items():
                files[node, f"got{rank}", "A"] = (save, content)
    fresh = world._replace(ranks=ranks, start=world.start + 1, step=step, kept=save, files=_frozen(files))
    return _begin_save(fresh._replace(done=(-1,) * len(ranks)), copies)


def _next(world, copies, last_step):
    if world.is_down:
        yield _load(world, world.ranks, copies)
    else:
        for rank, phase in enumerate(world.phases):
            if phase < DONE:
                yield _advance(world, rank, copies)
        if set(world.phases) == {DONE} and world.step < last_step:
            yield _commit(world, copies)
            if world.joins:
                yield _load(_commit(world, copies)._replace(joins=0), (*world.ranks, "j"), copies)
    if world.deaths and len(world.ranks) > 1 and (copies > 1 or not world.is_down):
        for node in world.ranks:
            left = frozenset(held for held in world.files if held[0][0] != node)
            ranks = tuple(other for other in world.ranks if other != node)
            yield world._replace(ranks=ranks, files=left, deaths=world.deaths - 1, is_down=True)


@pytest.mark.parametrize("copies", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_in_every_order_of_events_there_is_a_whole_save_and_never_two_mixed(copies):
    nodes = ("a", "b", "c")
    first = World(nodes, 1, 0, (), (), (-1,) * 3, None, frozenset(), 2, 1, False, False)
    first = _begin_save(first, copies)
    seen, open_ = {first}, [first]
    while open_:
        world = open_.pop()
        if world.has_committed:
            assert _whole(world), world
        for following in _next(world, copies, last_step=2):
            if following not in seen:
                seen.add(following)
                open_.append(following)
    assert any(world.deaths == 0 and world.joins == 0 and world.step == 2 for world in seen)
    assert len(seen) > 10_000
