"""Who keeps a job from going on, from what its ranks have written. Budget: 2 s."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hetero.errors import StepError
from ds_hetero.runtime.peers.board import ENDED, FAILED, STOPPED, Collective, End, Status
from ds_hetero.runtime.peers.calls import (
    BACKWARD,
    FETCH,
    FORWARD,
    SAVE,
    STEP,
    Calls,
    Counts,
    History,
    expect_same_counts,
)
from ds_hetero.runtime.peers.diagnosis import GONE, Evidence, diagnose, diagnose_alone
from ds_hetero.runtime.peers.posted_calls import PostedCollective

TRAINED = (FETCH, FORWARD, BACKWARD, STEP)


def status(
    *made: str, waits: bool = True, in_script: bool = False, left: bool = False, unchanged_s: float = 2.0
) -> Status:
    """A rank that has made these calls."""
    calls = Calls()
    for call in made:
        calls.record(call)
    if left:
        calls.leave_loop()
    return Status(1, "barrier at train.py:7", waits, in_script, 2.0, calls.history())


def inside(
    name: str, group: str, number: int, others: dict[str, int] | None = None, size: int = 2, handle: bool = False
) -> Status:
    """A rank that waits in a collective: the ``number``-th of its group, after so many of other groups."""
    collective = None if handle else Collective(name, group, list(range(size)))
    counts = {group: number, **(others or {})}
    place = f"{name} at train.py:7"
    return Status(1, place, True, True, 9.0, Calls().history(), collective, counts)


def gathering(*modules: str, before: int = 0) -> Status:
    """A rank that has gathered parameters of these modules, after so many others."""
    return status(*TRAINED)._replace(gathers=History(modules, before, False))


def posted(*names: str, unchanged_s: float = 9.0, **more: Any) -> Status:
    """A rank on NCCL that stands where it needs a number, after collectives of the world of these names.

    The last ``by_engine`` of them are not the script's own.
    """
    num_of_script = len(names) - more.get("by_engine", 0)
    calls = [
        PostedCollective(number, name, f"{name} at train.py:7", number <= num_of_script)
        for number, name in enumerate(names, 1)
    ]
    collective = Collective(names[-1], "0", [0, 1])
    return Status(
        question_number=1,
        place=f"{names[-1]} at train.py:7",
        waits=True,
        in_script=True,
        unchanged_s=unchanged_s,
        history=more.get("history", Calls().history()),
        collective=collective,
        counts={"0": len(names), **more.get("counts", {})},
        may_compute=True,
        posted={"0": calls},
        gathers=more.get("gathers", Calls().history()),
    )


# By name: what each rank has done, more evidence, and what the diagnosis begins with; None for no diagnosis.
CASES: dict[str, tuple[list[Status], dict[str, Any], str | None]] = {
    "one rank is behind": ([status(*TRAINED, FETCH), status(*TRAINED)], {}, None),
    "other modules on one rank": (
        [gathering("embed", "even", "head"), gathering("embed", "odd"), gathering("embed", "even")],
        {},
        "ranks 0, 2 called even, rank 1 called odd. ZeRO-3 gathers",
    ),
    "one rank a module behind": ([gathering("even", "head", before=1), gathering("embed", "even")], {}, None),
    "generate on one rank of ZeRO-3, and a collective of the script": (
        [
            inside("all_gather", "1", 5, {"0": 7})._replace(gathers=History(["embed"], 40, False), in_script=False),
            inside("barrier", "0", 7, {"1": 4})._replace(gathers=History(["head"], 39, False)),
        ],
        {},
        "rank 0 called embed, while rank 1 waits in barrier at train.py:7. It is a module whose parameters ZeRO-3",
    ),
    "generate on one rank of ZeRO-3, and a collective of the script, where calls return": (
        [
            posted("all_reduce", "all_gather", by_engine=1, gathers=History(["embed", "head"], 40, False)),
            posted("all_reduce", "barrier", gathers=History(["head"], 39, False)),
        ],
        {},
        "rank 0 called embed, while rank 1 waits in barrier at train.py:7. It is a module whose parameters ZeRO-3",
    ),
    "unlike collectives of the script on ZeRO-3, where calls return": (
        [posted("barrier", gathers=History(["head"], 39, False))] * 2
        + [posted("broadcast", gathers=History(["head"], 39, False))],
        {},
        "rank 2 waits in broadcast at train.py:7, ranks 0, 1 wait in barrier at train.py:7: these collectives can",
    ),
    "all wait in one place": ([status(*TRAINED, FETCH)] * 3, {}, None),
    "a forward left out": (
        [status(FETCH, FORWARD), status(FETCH, FETCH), status(FETCH, FORWARD)],
        {},
        "rank 1 left out a forward, in which the others wait. Every rank",
    ),
    "a step left out by two": (
        [status(FETCH, FORWARD, BACKWARD, FETCH)] + [status(*TRAINED)] * 2,
        {},
        "rank 0 left out the engine's step",
    ),
    "one forward more of one among four": (
        [status(*TRAINED, FETCH)] * 3 + [status(*TRAINED, FORWARD)],
        {},
        "rank 3 called a forward once more, while the others wait for the next batch. Every rank",
    ),
    "two against two": (
        [status(*TRAINED, FETCH)] * 2 + [status(*TRAINED, FORWARD)] * 2,
        {},
        "ranks 0, 1 left out a forward, in which the others wait. Or ranks 2, 3 called it once more. Every rank",
    ),
    "unlike collectives of one group": (
        [inside(name, "0", 7, size=3) for name in ("all_reduce", "all_gather", "all_gather")],
        {},
        "rank 0 waits in all_reduce at train.py:7, ranks 1, 2 wait in all_gather at train.py:7: these collectives can",
    ),
    "unlike collectives that were posted, and passed by": (
        [posted("barrier", "all_gather"), posted("broadcast", "all_gather", "all_reduce")],
        {},
        "rank 0 waits in barrier at train.py:7, rank 1 waits in broadcast at train.py:7: these collectives can never",
    ),
    "one collective by two functions": (
        [posted("all_gather"), posted("all_gather_into_tensor"), posted("all_gather_single")],
        {},
        None,
    ),
    "unlike collectives of ranks that go on": (
        [posted("barrier", unchanged_s=0.1), posted("broadcast", unchanged_s=0.1)],
        {},
        None,
    ),
    "a long step of the device, which the others have posted, too, and have gone on from": (
        [posted("all_reduce"), posted("all_reduce", "all_gather", history=status(FETCH).history)],
        {},
        None,
    ),
    "an all_reduce of the script that the others have not posted, and have gone on": (
        [posted("all_reduce", counts={"1": 1}), posted("all_gather", counts={"1": 0}, history=status(FETCH).history)],
        {},
        "rank 0 waits in all_reduce at train.py:7",
    ),
    "collectives of two groups, each waiting for the other rank": (
        [inside("all_reduce", "1", 2, {"0": 6}), inside("barrier", "0", 7, {"1": 1})],
        {},
        "rank 0 waits in all_reduce at train.py:7, rank 1 waits in barrier at train.py:7: these collectives can never",
    ),
    "a handle of ZeRO-3 on one rank, the loader's exchange on the others": (
        [inside("wait", "0", 9, {"1": 4}, handle=True), *[inside("all_gather", "1", 5, {"0": 7})] * 2],
        {},
        "rank 0 waits in wait at train.py:7, ranks 1, 2 wait in all_gather at train.py:7: these collectives can never",
    ),
    "a handle, and a rank that has not come to its collective": (
        [inside("wait", "0", 9, {"1": 5}, handle=True), inside("all_gather", "1", 5, {"0": 7})],
        {},
        None,
    ),
    "a broadcast whose source computes, and a rank that has got it": (
        [status(waits=False), inside("broadcast", "0", 7, size=3), inside("barrier", "0", 8, size=3)],
        {},
        None,
    ),
    "a collective that takes long": ([inside("all_reduce", "0", 7)] * 2, {}, None),
    "a checkpoint of one rank": (
        [status(*TRAINED, SAVE), status(*TRAINED, FETCH)],
        {},
        "rank 1 left out the saving of a checkpoint",
    ),
    "two ranks at different calls": (
        [status(FETCH, FORWARD), status(FETCH, SAVE)],
        {},
        "rank 0 called a forward, rank 1 called the saving of a checkpoint. Every rank",
    ),
    "a loop left for a barrier": (
        [status(*TRAINED, FETCH), status(*TRAINED, in_script=True, left=True)],
        {},
        "rank 1 has left the loop over its batches and waits in barrier at train.py:7, while the others wait in",
    ),
    "a barrier that may still be reached by all": (
        [status(*TRAINED, FETCH), status(*TRAINED, in_script=True)],
        {},
        None,
    ),
    "the script of one rank is over": (
        [status(*TRAINED, FETCH)],
        {"ends": [End(1, ENDED, "")]},
        "rank 1 ended, while the others wait for the next batch",
    ),
    "the script of one rank is over, amid a forward of the others": (
        [inside("all_gather", "world", 7)],
        {"ends": [End(1, ENDED, "", {"world": 6})]},
        "rank 1 ended, while the others wait in all_gather at train.py:7",
    ),
    "the script of one rank is over, which has made all collectives": (
        [inside("all_gather", "world", 7)],
        {"ends": [End(1, ENDED, "", {"world": 7})]},
        None,
    ),
    "the script of one rank is over, which is not in the group": (
        [inside("all_gather", "pair", 7)],
        {"ends": [End(1, ENDED, "", {"world": 6})]},
        None,
    ),
    "the script of one rank is over, and who waits does so by a handle": (
        [inside("all_gather", "pair", 7, {"world": 8}, handle=True)],
        {"ends": [End(1, ENDED, "", {"world": 6})]},
        "rank 1 ended, while the others wait in all_gather at train.py:7",
    ),
    "a loop left for a barrier, where calls return before they are over": (
        [
            status(*TRAINED, FETCH)._replace(
                posted={"world": [PostedCollective(5, "all_gather", "all_gather at train.py:3")]}
            ),
            status(*TRAINED, in_script=True, left=True)._replace(
                posted={"world": [PostedCollective(5, "barrier", "barrier at train.py:7", True)]}
            ),
        ],
        {},
        "rank 1 has left the loop over its batches and waits in barrier at train.py:7, while the others wait in",
    ),
    "the script of one rank is over, the others write files": (
        [status(*TRAINED, waits=False)],
        {"ends": [End(1, ENDED, "")]},
        None,
    ),
    "an error of one rank": (
        [status(FETCH)],
        {"ends": [End(2, STOPPED, "PeerError: rank 1"), End(1, FAILED, "ValueError: no")], "dead": [1, 2]},
        "rank 1 has ended with ValueError: no",
    ),
    "a killed rank, and one that has ended because of it": (
        [status(FETCH)],
        {"ends": [End(2, STOPPED, "PeerError: rank 1")], "dead": [1, 2]},
        "rank 1 gone: killed",
    ),
    "no answer, and nothing has broken": ([status(FETCH)], {"silent": [1]}, None),
    "no answer, and a connection has broken": (
        [status(FETCH)],
        {"silent": [1], "has_lost_peer": True},
        "rank 1 gone or unreachable",
    ),
    "a stopped rank, and nothing has broken": ([status(FETCH)], {"stopped": [1]}, None),
    "a stopped rank, and a timeout": (
        [status(FETCH)],
        {"stopped": [1], "silent": [1], "has_lost_peer": True},
        "rank 1 stopped by a signal",
    ),
}


@pytest.mark.parametrize(("statuses", "more", "expected"), CASES.values(), ids=CASES)
def test_who_is_to_blame(statuses: list[Status], more: dict[str, Any], expected: str | None) -> None:
    diagnosis = diagnose(Evidence(dict(enumerate(statuses)), **more))
    if expected is None:
        assert diagnosis is None
    else:
        assert diagnosis is not None and diagnosis.text.startswith(expected), diagnosis


def test_an_interrupted_call_is_blamed_on_its_rank_alone() -> None:
    calls = Calls()
    calls.record(FETCH)
    calls.record(FORWARD)
    calls.fail(ValueError("odd batch"))
    calls.record(FETCH)
    others = status(FETCH, FORWARD)
    interrupted = others._replace(history=calls.history())
    diagnosis = diagnose(Evidence({0: others, 1: others, 2: interrupted}))
    assert diagnosis is not None and diagnosis.error != GONE
    assert diagnosis.text.startswith("rank 2 went on after a forward, which ended with ValueError: odd batch")


def test_only_ranks_that_did_less_are_named() -> None:
    expect_same_counts([Counts(1, 1, 1, 4)] * 3)
    with pytest.raises(StepError) as caught:
        expect_same_counts([Counts(1, 1, 1, 4), Counts(0, 0, 0, 4), Counts(1, 1, 1, 4)])
    assert "rank 1 ran 0 forwards, 0 backwards, 0 steps since" in str(caught.value)
    assert "rank 0" not in str(caught.value) and "ranks 0" not in str(caught.value)


def test_old_calls_are_forgotten_and_still_compared() -> None:
    calls, others = Calls(), Calls()
    for _ in range(100):
        for call in TRAINED:
            calls.record(call)
            others.record(call)
    calls.record(FETCH)
    others.record(SAVE)
    assert len(calls.history().calls) < 100
    of = {rank: status()._replace(history=made.history()) for rank, made in enumerate((calls, others))}
    diagnosis = diagnose(Evidence(of))
    assert diagnosis is not None and diagnosis.text.startswith("rank 0 left out the saving of a checkpoint")


def test_a_rank_that_the_store_does_not_answer_names_who_is_stopped_or_was_killed_first() -> None:
    assert diagnose_alone([], [], []) is None
    stopped = diagnose_alone([], dead=[2], stopped=[0])
    assert stopped is not None and stopped.text.startswith("rank 0 stopped by a signal (SIGSTOP)")
    killed = diagnose_alone([], dead=[0, 2], stopped=[])
    assert killed is not None and killed.text.startswith("rank 0 gone: killed")
    ended = diagnose_alone([End(0, FAILED, "ValueError: x")], dead=[0], stopped=[])
    assert ended is not None and ended.text == "rank 0 has ended with ValueError: x"
