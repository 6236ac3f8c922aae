"""Conclude from the statuses of the ranks why a job cannot go on: pure functions, with one result on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.runtime.peers.board import ENDED, FAILED, End, Status
from ds_hetero.runtime.peers.calls import FETCH, GATHERS_DIFFER, INTERRUPTED, REMEDY, History, first_difference
from ds_hetero.runtime.peers.posted_calls import PostedCollective

GONE, STEP = "PeerError", "StepError"  # values of `Diagnosis.error`
# Both chosen, never measured: longer than ranks that make the same calls are apart, shorter than a user waits.
_IN_COLLECTIVE_S = 5.0  # a rank that is this long in a collective which the others have not called waits in vain
_LEFT_S = 1.0  # the same for a rank that has left the loop over its batches


class Diagnosis(NamedTuple):
    """The reason why the job cannot go on."""

    error: str  # class of the error that all other ranks raise, `GONE` or `STEP`
    text: str  # names the ranks that caused it, and says what to do


STORE_GONE = Diagnosis(
    GONE, "rank 0 or the launcher, whichever keeps the store of the job, cannot be reached any more."
)


@dataclass(frozen=True)
class Evidence:
    """What a rank knows of the other ranks when it looks for a diagnosis."""

    statuses: Mapping[int, Status]  # answers to this rank's question, by rank
    ends: Sequence[End] = ()  # last words of ranks that have ended
    dead: Sequence[int] = ()  # ranks of this host whose process does not exist any more
    stopped: Sequence[int] = ()  # ranks of this host whose process is stopped by a signal
    silent: Sequence[int] = ()  # ranks that have not answered in time
    has_lost_peer: bool = False  # whether the backend has reported that some rank is gone


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """Return why the job cannot go on; None if the ranks may just be slow.

    Certain causes come first: a rank that raised an error, and a process that does not exist any more. The rules behind
    them compare what ranks have called; a lost connection alone (the last rule) explains the least.
    """
    if failed := [end for end in evidence.ends if end.outcome == FAILED]:
        return Diagnosis(GONE, "; ".join(f"rank {end.rank} has ended with {end.text}" for end in failed))
    ranks_with_end = {end.rank for end in evidence.ends}
    if dead := [rank for rank in evidence.dead if rank not in ranks_with_end]:
        return Diagnosis(
            GONE,
            f"{ranks_text(dead)} gone: killed, or crashed without a last word. The output of the launcher, or of the "
            "kernel where memory ran out, names the signal.",
        )
    return (
        _different_calls(evidence)
        or _different_gathers(evidence.statuses)
        or _ended_early(evidence)
        or _different_posted_collectives(evidence.statuses)
        or _left_behind(evidence.statuses)
        or _alone_in_model(evidence.statuses)
        or _deadlocked_collectives(evidence.statuses)
        or _without_an_answer(evidence, ranks_with_end)
    )


def diagnose_alone(ends: Sequence[End], dead: Sequence[int], stopped: Sequence[int]) -> Diagnosis | None:
    """Return why the job cannot go on, without the store; None if this host shows no reason.

    Args:
        ends: last words of ranks, as far as they were read.
        dead: ranks of this host whose process does not exist any more.
        stopped: ranks of this host whose process is stopped by a signal.
    """
    if stopped:
        dead = ()  # the dead have ended because of the stopped ones
    elif 0 in dead and all(end.rank != 0 for end in ends):
        dead = (0,)  # rank 0 keeps the store until the others have ended, unless it was killed
    if not dead and not stopped:
        return None
    return diagnose(Evidence({}, ends, dead, stopped, has_lost_peer=True))


def _different_calls(evidence: Evidence) -> Diagnosis | None:
    """Find ranks whose calls differ from the calls of most ranks, at the first index with a difference."""
    histories = {rank: status.history for rank, status in evidence.statuses.items()}
    first = max((history.num_before for history in histories.values()), default=0)
    for index in range(first, max((history.end for history in histories.values()), default=0)):
        calls_or_none = {rank: history.at(index) for rank, history in histories.items()}
        calls = {rank: call for rank, call in calls_or_none.items() if call is not None}
        if len(set(calls.values())) > 1:
            return Diagnosis(STEP, f"{_blame(calls, histories)} {REMEDY}")
    return None


def _different_gathers(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find ranks that called other modules than most ranks, on ZeRO-3."""
    calls = first_difference({rank: status.gathers for rank, status in statuses.items()})
    if calls is None:
        return None
    texts = [f"{ranks_text(ranks)} called {call}" for call, ranks in ranks_by_value(calls.items()).items()]
    return Diagnosis(STEP, f"{', '.join(texts)}. {GATHERS_DIFFER.format(known='')}")


def _blame(calls: Mapping[int, str], histories: Mapping[int, History]) -> str:
    """Return a sentence that names the ranks whose call differs from the call of the other ranks.

    Args:
        calls: for each rank, its call at the first index at which the ranks' calls differ.
        histories: all remembered calls, by rank.
    """
    ranks_by_call = ranks_by_value(calls.items())
    interrupted: dict[int, str] = {}
    for rank in calls:
        for call in histories[rank].calls:
            if INTERRUPTED in call:
                interrupted[rank] = call
    if interrupted and len(interrupted) < len(calls):
        return " ".join(f"rank {rank} went on after {call}; the others wait." for rank, call in interrupted.items())
    if FETCH in ranks_by_call and len(ranks_by_call) == 2:
        # Some ranks are a call ahead or behind. The larger number of ranks is believed to be right.
        other_call = next(call for call in ranks_by_call if call != FETCH)
        fetching, calling = ranks_by_call[FETCH], ranks_by_call[other_call]
        if len(fetching) > len(calling):
            return f"{ranks_text(calling)} called {other_call} once more, while the others wait for {FETCH}."
        text = f"{ranks_text(fetching)} left out {other_call}, in which the others wait."
        if len(fetching) < len(calling):
            return text
        return f"{text} Or {ranks_text(calling)} called it once more."
    fewest_first = sorted(ranks_by_call.items(), key=lambda entry: len(entry[1]))
    return ", ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in fewest_first) + "."


def _ended_early(evidence: Evidence) -> Diagnosis | None:
    """Find ranks that have ended with their script while another waits for a collective that they will not call.

    NCCL closes no connection that a waiting rank would notice, so the numbers of collectives show it: an ended rank
    that has begun fewer collectives of a process group than the waiting one is missing there. Example: rank 0 waits in
    its 7th collective of the group of all ranks, and rank 1 has ended after 6.
    """
    ends = {end.rank: end for end in evidence.ends if end.outcome == ENDED}
    for status in evidence.statuses.values():
        if not status.waits or status.unchanged_s < _LEFT_S:
            continue
        missing = [rank for rank, end in ends.items() if _is_behind(status, end.counts or {})]
        if missing:
            return Diagnosis(STEP, f"{ranks_text(missing)} ended, while the others wait in {status.place}. {REMEDY}")
        if ends and list(status.history.calls[-1:]) == [FETCH]:
            return Diagnosis(STEP, f"{ranks_text([*ends])} ended, while the others wait for the next batch. {REMEDY}")
    return None


def _left_behind(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find a rank that waits in the script's collective while the others went on to their next call."""
    farthest = max((status.history.end for status in statuses.values()), default=0)
    for rank, status in statuses.items():
        if status.may_compute and not any(_is_behind(status, other.counts) for other in statuses.values()):
            continue  # its device may still compute, while the others have posted the same and gone on
        end, has_left = status.history.end, status.history.has_left
        patience_s = _LEFT_S if has_left else _IN_COLLECTIVE_S
        if end < farthest and status.in_script and status.unchanged_s >= patience_s:
            call = next(other.history.at(end) for other in statuses.values() if other.history.end == farthest)
            return _waits_apart(rank, status.place, str(call), has_left=has_left)
    return None


def _waits_apart(rank: int, place: str, call: str, *, has_left: bool) -> Diagnosis:
    """Return the diagnosis for a rank that waits in ``place`` while the others wait in ``call``.

    Args:
        has_left: the rank has left the loop over its batches.
    """
    left = " has left the loop over its batches and" if has_left else ""
    return Diagnosis(STEP, f"rank {rank}{left} waits in {place}, while the others wait in {call}. {REMEDY}")


def _alone_in_model(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find ranks that run the model on ZeRO-3 while another rank waits for them in a collective of the script.

    The numbers of collectives need not show it: with gloo they include point-to-point messages, and a ring posts many.
    """
    waiting = {rank: s for rank, s in statuses.items() if s.waits and s.unchanged_s >= _IN_COLLECTIVE_S}
    farthest = max((status.gathers.end for status in statuses.values()), default=0)
    ahead = [rank for rank, s in waiting.items() if s.gathers.end == farthest and not s.in_script]
    for rank, status in waiting.items():
        waits_for = [] if status.collective is None else [other for other in ahead if other in status.collective.ranks]
        if waits_for and status.in_script and status.gathers.end < farthest:
            return _run_alone(waits_for, [rank], statuses, status.place)
    return None


def _run_alone(ahead: Sequence[int], behind: Sequence[int], statuses: Mapping[int, Status], place: str) -> Diagnosis:
    """Return the diagnosis for a module that ranks ``ahead`` have called, and ranks ``behind`` have not.

    Args:
        place: the call in which the ranks ``behind`` wait.
    """
    gathers, num_of_both = statuses[ahead[0]].gathers, statuses[behind[0]].gathers.end
    module = gathers.at(num_of_both) or gathers.calls[-1]
    return Diagnosis(
        STEP,
        f"{ranks_text(ahead)} called {module}, while {ranks_text(behind)} wait{'s' if len(behind) == 1 else ''} in "
        f"{place}. It is a module whose parameters ZeRO-3 gathers from all ranks: forwards, evaluations and generate, "
        "too, run on every rank.",
    )


def _different_posted_collectives(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find ranks whose collectives with the same number in a process group differ, on NCCL.

    Calls return at once on NCCL, so the ranks may be at other points of their scripts by now.
    """
    if not any(status.waits and status.unchanged_s >= _LEFT_S for status in statuses.values()):
        return None
    by_call: dict[tuple[str, int], dict[int, PostedCollective]] = {}
    for rank, status in statuses.items():
        for group, calls in status.posted.items():
            for call in calls:
                by_call.setdefault((group, call.number), {})[rank] = call
    for calls_of_ranks in by_call.values():
        if len({_kind(call.name) for call in calls_of_ranks.values()}) > 1:
            return (
                _posted_alone_in_model(statuses, calls_of_ranks)
                or _posted_after_the_loop(statuses, calls_of_ranks)
                or _never_meet({rank: call.place for rank, call in calls_of_ranks.items()})
            )
    return None


def _posted_alone_in_model(statuses: Mapping[int, Status], posted: Mapping[int, PostedCollective]) -> Diagnosis | None:
    """Find ranks that have posted a gather of ZeRO-3, while others have posted a collective of the script.

    Args:
        posted: for each rank, its collective with the same number in one process group; these collectives differ.
    """
    num_gathers = {rank: statuses[rank].gathers.end for rank in posted}
    farthest = max(num_gathers.values())
    ahead = [rank for rank, call in posted.items() if num_gathers[rank] == farthest and not call.in_script]
    behind = [rank for rank, call in posted.items() if num_gathers[rank] < farthest and call.in_script]
    if not ahead or not behind:
        return None
    return _run_alone(ahead, behind, statuses, posted[behind[0]].place)


def _posted_after_the_loop(statuses: Mapping[int, Status], posted: Mapping[int, PostedCollective]) -> Diagnosis | None:
    """Find a rank that has left the loop over its batches before the others, and posted a collective of the script.

    Args:
        posted: for each rank, its collective with the same number in one process group; these collectives differ.
    """
    left = [rank for rank, call in posted.items() if call.in_script and statuses[rank].history.has_left]
    others = [rank for rank in posted if rank not in left]
    if not left or not others:
        return None
    return _waits_apart(left[0], posted[left[0]].place, statuses[others[0]].place, has_left=True)


def _kind(name: str) -> str:
    """Return the kind of a collective; variants with a list and with a tensor are the same kind for the backend."""
    return name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")


def _deadlocked_collectives(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find ranks that wait in collectives of torch that can never complete.

    Case 1: ranks are in collective number n of the same process group, but not in the same collective. The backend
    matches the collectives of a group in their order.

    Case 2: a circle. Rank a is in a collective that rank b has not begun, b waits likewise for c, and so on back to a.
    Ranks that begin all collectives in the same order cannot form one.

    If a rank waits for a handle, its collective is not known; it may be one of any group.
    """
    waiting = {rank: s for rank, s in statuses.items() if s.waits and s.unchanged_s >= _IN_COLLECTIVE_S}
    inside = {rank: s.collective for rank, s in waiting.items() if s.collective is not None}
    for rank, collective in inside.items():
        number = statuses[rank].counts.get(collective.group)
        with_same_number = []
        for other in collective.ranks:
            is_in_group = other in inside and inside[other].group == collective.group
            if not is_in_group or statuses[other].may_compute:
                continue
            if statuses[other].counts.get(collective.group) == number:
                with_same_number.append(other)
        if len({inside[other].name for other in with_same_number}) > 1:
            return _never_meet({other: statuses[other].place for other in with_same_number})
    waits_for = {}
    for rank, status in waiting.items():
        waits_for[rank] = [other for other in waiting if _is_behind(status, waiting[other].counts)]
    circle = _circle(waits_for)
    return _never_meet({rank: statuses[rank].place for rank in circle}) if inside.keys() & circle else None


def _is_behind(status: Status, counts: Mapping[str, int]) -> bool:
    """Whether a rank has not begun the collective in which another rank, the waiting one, waits.

    If that collective is not known, compares all process groups that both ranks have.

    Args:
        status: of the waiting rank.
        counts: how many collectives the first rank has begun, by process group.
    """
    groups = status.counts.keys() & counts.keys()
    if status.collective is not None:
        groups &= {status.collective.group}
    return any(counts[group] < status.counts[group] for group in groups)


def _circle(waits_for: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the ranks that wait in a circle, and all ranks that wait for those; [] if there is no circle.

    Method: remove ranks that wait for no remaining rank, until there are none. Example: 0 waits for 1, 1 for 2 and 2
    for 1, so that all three remain.
    """
    remaining = {rank: set(others) for rank, others in waits_for.items()}
    while True:
        free = [rank for rank, others in remaining.items() if not others & remaining.keys()]
        if not free:
            return sorted(remaining)
        for rank in free:
            del remaining[rank]


def _never_meet(place_of_rank: Mapping[int, str]) -> Diagnosis:
    """Return the diagnosis for ranks that wait in different places; it names the place with the fewest ranks first."""
    ranks_by_place = ranks_by_value(sorted(place_of_rank.items()))
    texts = []
    for place, ranks in sorted(ranks_by_place.items(), key=lambda entry: len(entry[1])):
        texts.append(f"{ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''} in {place}")
    return Diagnosis(STEP, f"{', '.join(texts)}: these collectives can never meet. {REMEDY}")


def _without_an_answer(evidence: Evidence, ranks_with_end: set[int]) -> Diagnosis | None:
    """Find ranks that have ended, are stopped or do not answer, after the backend has reported a lost rank."""
    if not evidence.has_lost_peer:
        return None
    if ended := [end.rank for end in evidence.ends if end.outcome == ENDED]:
        return Diagnosis(STEP, f"{ranks_text(ended)} ended, while the others go on. {REMEDY}")
    if evidence.stopped:
        return Diagnosis(
            GONE, f"{ranks_text(evidence.stopped)} stopped by a signal (SIGSTOP), and did not go on in time."
        )
    if silent := [rank for rank in evidence.silent if rank not in ranks_with_end]:
        return Diagnosis(GONE, f"{ranks_text(silent)} gone or unreachable: no answer to the other ranks.")
    return None
