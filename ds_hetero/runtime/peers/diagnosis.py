"""Diagnosis of a job that cannot go on, from what its ranks wrote: pure functions, the same answer on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.runtime.peers.board import ENDED, FAILED, End, Status
from ds_hetero.runtime.peers.calls import FETCH, GATHERS_DIFFER, INTERRUPTED, REMEDY, History, first_difference
from ds_hetero.runtime.peers.posted import Numbered

GONE, STEP = "PeerError", "StepError"
_IN_COLLECTIVE_S = 5.0  # a rank this long in a collective that the others have passed by waits in vain
_LEFT_S = 1.0  # the same where it has left the loop over its batches


class Diagnosis(NamedTuple):
    """The reason why the job cannot go on."""

    error: str  # the class of the error that all other ranks raise, `GONE` or `STEP`
    text: str  # names the ranks that caused it and what to do


STORE_GONE = Diagnosis(
    GONE, "rank 0 or the launcher, whichever keeps the store of the job, cannot be reached any more."
)


@dataclass(frozen=True)
class Evidence:
    """Evidence of a rank on the others."""

    statuses: Mapping[int, Status]  # answers to its question, by rank
    ends: Sequence[End] = ()  # last words of ranks
    dead: Sequence[int] = ()  # ranks of this host whose process does not exist any more
    stopped: Sequence[int] = ()  # ranks of this host whose process is stopped by a signal
    silent: Sequence[int] = ()  # ranks that have not answered in time
    has_lost_peer: bool = False  # whether the backend has reported that some rank is gone


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """Return what keeps the job from going on; None where the ranks may just be slow."""
    if failed := [end for end in evidence.ends if end.how == FAILED]:
        return Diagnosis(GONE, "; ".join(f"rank {end.rank} has ended with {end.text}" for end in failed))
    known = {end.rank for end in evidence.ends}
    if dead := [rank for rank in evidence.dead if rank not in known]:
        return Diagnosis(
            GONE,
            f"{ranks_text(dead)} gone: killed, or crashed without a last word. The output of the launcher, or of the "
            "kernel where memory ran out, names the signal.",
        )
    return (
        _different_calls(evidence)
        or _different_gathers(evidence.statuses)
        or _unlike_posted(evidence.statuses)
        or _passed_by(evidence)
        or _alone_in_model(evidence.statuses)
        or _unlike_collectives(evidence.statuses)
        or _without_an_answer(evidence, known)
    )


def diagnose_alone(ends: Sequence[End], dead: Sequence[int], stopped: Sequence[int]) -> Diagnosis | None:
    """Return what keeps the job from going on where the store cannot say; None where nothing is seen here.

    Args:
        ends: last words of ranks, as far as they were read.
        dead: ranks of this host whose process does not exist any more.
        stopped: ranks of this host whose process is stopped by a signal.
    """
    if stopped:
        dead = ()  # they have ended because of these
    elif 0 in dead and all(end.rank != 0 for end in ends):
        dead = (0,)  # it would have kept the store until the others end, had it not been killed
    if not dead and not stopped:
        return None
    return diagnose(Evidence({}, ends, dead, stopped, has_lost_peer=True))


def _different_calls(evidence: Evidence) -> Diagnosis | None:
    """Whose calls are not those of the others."""
    histories = {rank: status.history for rank, status in evidence.statuses.items()}
    first = max((history.num_before for history in histories.values()), default=0)
    for index in range(first, max((history.end for history in histories.values()), default=0)):
        calls = {rank: call for rank, history in histories.items() if (call := history.at(index)) is not None}
        if len(set(calls.values())) > 1:
            return Diagnosis(STEP, f"{_blame(calls, histories)} {REMEDY}")
    return None


def _different_gathers(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find ranks that call other modules than the others, on ZeRO-3."""
    calls = first_difference({rank: status.gathers for rank, status in statuses.items()})
    if calls is None:
        return None
    said = ", ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in ranks_by_value(calls.items()).items())
    return Diagnosis(STEP, f"{said}. {GATHERS_DIFFER.format(known='')}")


def _blame(calls: Mapping[int, str], histories: Mapping[int, History]) -> str:
    """Return one sentence on calls that differ: which ranks did something else than the others."""
    groups = ranks_by_value(calls.items())
    interrupted = {rank: call for rank in calls for call in histories[rank].calls if INTERRUPTED in call}
    if interrupted and len(interrupted) < len(calls):
        return " ".join(f"rank {rank} went on after {call}; the others wait." for rank, call in interrupted.items())
    if FETCH in groups and len(groups) == 2:
        other = next(call for call in groups if call != FETCH)
        surplus = len(groups[FETCH]) - len(groups[other])
        if surplus > 0:
            return f"{ranks_text(groups[other])} called {other} once more, while the others wait for {FETCH}."
        tied = f" Or {ranks_text(groups[other])} called it once more." if surplus == 0 else ""
        return f"{ranks_text(groups[FETCH])} left out {other}, in which the others wait.{tied}"
    fewest_first = sorted(groups.items(), key=lambda group: len(group[1]))
    return ", ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in fewest_first) + "."


def _passed_by(evidence: Evidence) -> Diagnosis | None:
    """Find ranks that wait in the script's collective, or ended, while the others went on to their next call."""
    statuses = evidence.statuses
    farthest = max((status.history.end for status in statuses.values()), default=0)
    for rank, status in statuses.items():
        if status.may_compute and not any(_is_behind(status, other) for other in statuses.values()):
            continue  # others may have posted all that it has, and have gone on while its device computes
        end, has_left = status.history.end, status.history.has_left
        patience_s = _LEFT_S if has_left else _IN_COLLECTIVE_S
        if end < farthest and status.in_script and status.unchanged_s >= patience_s:
            call = next(other.history.at(end) for other in statuses.values() if other.history.end == farthest)
            left = " has left the loop over its batches and" if has_left else ""
            return Diagnosis(
                STEP, f"rank {rank}{left} waits in {status.place}, while the others wait in {call}. {REMEDY}"
            )
    ended = [end.rank for end in evidence.ends if end.how == ENDED]
    in_vain = [status for status in statuses.values() if status.waits and status.unchanged_s >= _LEFT_S]
    if ended and any(list(status.history.calls[-1:]) == [FETCH] for status in in_vain):
        return Diagnosis(STEP, f"{ranks_text(ended)} ended, while the others wait for the next batch. {REMEDY}")
    return None


def _alone_in_model(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find ranks that run the model on ZeRO-3 while another waits for them in a collective of the script.

    Numbers of collectives need not show it: gloo's include messages from rank to rank, of which a ring has many.
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
    """Say which module the ranks ``ahead`` have called and those ``behind``, who wait in ``place``, have not."""
    gathers, num_of_both = statuses[ahead[0]].gathers, statuses[behind[0]].gathers.end
    module = gathers.at(num_of_both) or gathers.calls[-1]
    return Diagnosis(
        STEP,
        f"{ranks_text(ahead)} called {module}, while {ranks_text(behind)} wait{'s' if len(behind) == 1 else ''} in "
        f"{place}. It is a module whose parameters ZeRO-3 gathers from all ranks: forwards, evaluations and generate, "
        "too, run on every rank.",
    )


def _unlike_posted(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find ranks that posted unlike collectives in one place of a process group's order, as NCCL allows.

    Calls return there: who made them may stand elsewhere by now.
    """
    if not any(status.waits and status.unchanged_s >= _LEFT_S for status in statuses.values()):
        return None
    by_call: dict[tuple[str, int], dict[int, Numbered]] = {}
    for rank, status in statuses.items():
        for group, calls in status.posted.items():
            for call in calls:
                by_call.setdefault((group, call.number), {})[rank] = call
    for calls_of_ranks in by_call.values():
        if len({_kind(call.name) for call in calls_of_ranks.values()}) > 1:
            alone = _posted_alone_in_model(statuses, calls_of_ranks)
            return alone or _apart({rank: call.place for rank, call in calls_of_ranks.items()})
    return None


def _posted_alone_in_model(statuses: Mapping[int, Status], posted: Mapping[int, Numbered]) -> Diagnosis | None:
    """Which ranks have posted a gather of ZeRO-3 where others have posted a collective of the script.

    Args:
        posted: by rank, the unlike collectives of one place in a process group's order.
    """
    num_gathers = {rank: statuses[rank].gathers.end for rank in posted}
    farthest = max(num_gathers.values())
    ahead = [rank for rank, call in posted.items() if num_gathers[rank] == farthest and not call.in_script]
    behind = [rank for rank, call in posted.items() if num_gathers[rank] < farthest and call.in_script]
    if not ahead or not behind:
        return None
    return _run_alone(ahead, behind, statuses, posted[behind[0]].place)


def _kind(name: str) -> str:
    """Return a collective's kind for the backend: some functions take a list where others take a tensor."""
    return name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")


def _unlike_collectives(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Find ranks that wait in torch's collectives that can never meet, in the script or elsewhere.

    Collectives of one process group meet in their order. So the ranks of a group that are in the collective of the same
    number have to be in the same one; and where a rank waits for another that has not begun that collective, and that
    one waits for a third or for the first likewise, all of them wait for ever. Which collective a rank waits for by a
    handle is not known: it may be one of any group. Ranks that begin all collectives in one order never form a circle.
    """
    waiting = {rank: s for rank, s in statuses.items() if s.waits and s.unchanged_s >= _IN_COLLECTIVE_S}
    inside = {rank: s.collective for rank, s in waiting.items() if s.collective is not None}
    for rank, own in inside.items():
        number = statuses[rank].counts.get(own.group)
        alike = [r for r in own.ranks if r in inside and inside[r].group == own.group and not statuses[r].may_compute]
        alike = [r for r in alike if statuses[r].counts.get(own.group) == number]
        if len({inside[r].name for r in alike}) > 1:
            return _apart({r: statuses[r].place for r in alike})
    ahead = {
        rank: [other for other in waiting if _is_behind(status, waiting[other])] for rank, status in waiting.items()
    }
    circle = _circle(ahead)
    return _apart({r: statuses[r].place for r in circle}) if inside.keys() & circle else None


def _is_behind(status: Status, other: Status) -> bool:
    """Whether ``other`` has not begun the collective in which ``status`` waits, as far as that one is known."""
    groups = status.counts.keys() & other.counts.keys()
    if status.collective is not None:
        groups &= {status.collective.group}
    return any(other.counts[group] < status.counts[group] for group in groups)


def _circle(ahead: Mapping[int, Sequence[int]]) -> list[int]:
    """Return ranks that wait for each other in a circle; none where there is no circle."""
    left = {rank: set(others) for rank, others in ahead.items()}
    while free := [rank for rank, others in left.items() if not others & left.keys()]:
        for rank in free:
            del left[rank]
    return sorted(left)


def _apart(place_of_rank: Mapping[int, str]) -> Diagnosis:
    """Say which ranks are where, the fewest first."""
    places = ranks_by_value(sorted(place_of_rank.items()))
    fewest_first = sorted(places.items(), key=lambda entry: len(entry[1]))
    said = ", ".join(
        f"{ranks_text(of_place)} wait{'s' if len(of_place) == 1 else ''} in {place}" for place, of_place in fewest_first
    )
    return Diagnosis(STEP, f"{said}: these collectives can never meet. {REMEDY}")


def _without_an_answer(evidence: Evidence, known: set[int]) -> Diagnosis | None:
    """Find ranks that do not answer although a backend has waited long enough."""
    if not evidence.has_lost_peer:
        return None
    if ended := [end.rank for end in evidence.ends if end.how == ENDED]:
        return Diagnosis(STEP, f"{ranks_text(ended)} ended, while the others go on. {REMEDY}")
    if evidence.stopped:
        return Diagnosis(
            GONE, f"{ranks_text(evidence.stopped)} stopped by a signal (SIGSTOP), and did not go on in time."
        )
    if silent := [rank for rank in evidence.silent if rank not in known]:
        return Diagnosis(GONE, f"{ranks_text(silent)} gone or unreachable: no answer to the other ranks.")
    return None
