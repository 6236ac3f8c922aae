"""Dealing documents to bins of unequal speed: whole where they fit into a time budget, else cut over a few bins.

A bin is a unit, or a node with the speed of all its units. `deal` takes documents longest first, as Zeppelin does
(EuroSys 2026, Algorithms 1 and 2), with seconds in place of tokens; `water_fill` shares out a document so that all bins
that hold some of it end together.

Only + - * / and comparisons in a fixed order decide, and `math.fsum`, which is exact, so that every rank comes to the
same result. Python's own sum of floats differs between its versions, numpy's between CPUs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ds_hetero.planner.document_search.unit_costs import Pieces

Queue = list[tuple[float, int]]  # (load, bin), ascending

# Chosen, never measured alone; `python -m benchmarks.documents plan` says how far placements with them are from the
# ideal.
SAME_KIND = 1.02  # bins whose costs differ by less wait in one queue
LEAST_FRAGMENT_TOKENS = 256
GRAINS = ((4096, 64), (0, 16))  # fragments of at least so many tokens on average are multiples of so many


class DocumentPart(NamedTuple):
    """Piece to be dealt: a document, or a node's share of it."""

    document: int  # its index
    length: int  # tokens of the whole document, which decide what attention costs per token
    tokens: int  # tokens to deal, at most ``length``


@dataclass(slots=True)
class Bins:
    """Bins with what they cost and what they hold so far."""

    token_s: list[float]  # seconds per token outside attention, ``[bin]``
    square_s: list[float]  # seconds per token and token of its document, ``[bin]``
    room: list[int]  # tokens that still fit, ``[bin]``
    load_s: list[float] = field(default_factory=list)  # seconds of work so far, ``[bin]``
    tokens: list[int] = field(default_factory=list)  # tokens so far, ``[bin]``

    def __post_init__(self) -> None:
        self.load_s = [0.0] * len(self.token_s)
        self.tokens = [0] * len(self.token_s)

    def put(self, index: int, length: int, tokens: int) -> None:
        """Add ``tokens`` of a document of ``length`` tokens to bin ``index``."""
        self.load_s[index] += tokens * (self.token_s[index] + length * self.square_s[index])
        self.tokens[index] += tokens
        self.room[index] -= tokens

    def fill(self, ring: Sequence[int], length: int, tokens: int) -> Pieces | None:
        """Share ``tokens`` of a document over the bins of ``ring`` and add them; None, and no change, without room."""
        load_s, room = self.load_s, self.room
        per = [self.token_s[i] + length * self.square_s[i] for i in ring]
        shares = water_fill([load_s[i] for i in ring], per, [room[i] for i in ring], tokens)
        if shares is None:
            return None
        pieces = []
        for i, share, per_s in zip(ring, shares, per, strict=True):
            if share:
                load_s[i] += share * per_s
                self.tokens[i] += share
                room[i] -= share
                pieces.append((i, share))
        return pieces


def deal(
    parts: Sequence[DocumentPart],
    bins: Bins,
    budget_s: float,
    least_tokens: int = LEAST_FRAGMENT_TOKENS,
    widen: int = 1,
) -> list[Pieces] | None:
    """Bins of every part, with tokens: one that ends first, or several if that takes too long; None without room.

    Args:
        parts: longest first.
        budget_s: a bin takes whole parts as long as it ends within this time.
        least_tokens: parts shorter than two of these are not cut, and fragments are this long where possible.
        widen: cut over so many times the bins that are needed.
    """
    queues = _Queues(bins)
    kinds, loads_s, room, held = queues.kinds, bins.load_s, bins.room, bins.tokens
    placed: list[Pieces] = []
    (token_s, square_s, best_queue), *others = kinds
    for part in parts:
        _, length, tokens = part
        best = best_queue[0]
        if others or room[best[1]] < tokens:
            best_s, best, best_queue = _first_to_end(kinds, room, length, tokens)
        else:
            best_s = best[0] + tokens * (token_s + length * square_s)
        if best_s < inf and (best_s <= budget_s or tokens < 2 * least_tokens):
            i = best[1]
            loads_s[i] += tokens * (bins.token_s[i] + length * bins.square_s[i])  # as `Bins.put`, without the call
            held[i] += tokens
            room[i] -= tokens
            if best is best_queue[0]:
                del best_queue[0]
            else:
                best_queue.remove(best)
            insort(best_queue, (loads_s[i], i))
            placed.append([(i, tokens)])
            continue
        before_s = loads_s.copy()
        pieces = _cut(part, bins, budget_s, least_tokens, widen)
        if pieces is None:
            return None
        for i, _ in pieces:
            queues.move(i, before_s[i])
        placed.append(pieces)
    return placed


def _first_to_end(
    kinds: Sequence[tuple[float, float, Queue]], room: Sequence[int], length: int, tokens: int
) -> tuple[float, tuple[float, int], Queue]:
    """When the bin that would end first with so many tokens would end, its entry, and its queue; never without room."""
    best_s, best, best_queue = inf, (inf, -1), kinds[0][2]
    for token_s, square_s, queue in kinds:
        entry = queue[0]
        if entry[0] >= best_s:
            continue
        if room[entry[1]] < tokens:
            entry = next((other for other in queue if room[other[1]] >= tokens), (inf, -1))
        end_s = entry[0] + tokens * (token_s + length * square_s)
        if end_s < best_s:
            best_s, best, best_queue = end_s, entry, queue
    return best_s, best, best_queue


class _Queues:
    """Bins by load, those of about the same speed in one queue: the first of each is its best choice.

    Attributes:
        kinds: seconds per token and per token and token of its document of the fastest bin of a queue, and the queue.
    """

    def __init__(self, bins: Bins) -> None:
        self._loads_s = bins.load_s
        self.kinds: list[tuple[float, float, Queue]] = []
        self._queue: list[Queue] = [[]] * len(bins.load_s)
        slowest_token_s = slowest_square_s = 0.0
        for token_s, square_s, i in sorted(zip(bins.token_s, bins.square_s, range(len(bins.token_s)), strict=True)):
            if token_s > slowest_token_s or square_s > slowest_square_s or square_s < self.kinds[-1][1]:
                self.kinds.append((token_s, square_s, []))
                slowest_token_s, slowest_square_s = SAME_KIND * token_s, SAME_KIND * square_s
            self._queue[i] = self.kinds[-1][2]
            self._queue[i].append((bins.load_s[i], i))
        for _, _, queue in self.kinds:
            queue.sort()

    def move(self, i: int, before_s: float) -> None:
        """Put bin ``i`` where it belongs after its load has changed from ``before_s``."""
        queue = self._queue[i]
        del queue[bisect_left(queue, (before_s, i))]
        insort(queue, (self._loads_s[i], i))


def _cut(part: DocumentPart, bins: Bins, budget_s: float, least_tokens: int, widen: int) -> Pieces | None:
    """Cut a part over the fewest bins that hold it within the budget, or over as many as have room for it."""
    _, length, tokens = part
    free = []
    for i, (load_s, token_s, square_s, room) in enumerate(
        zip(bins.load_s, bins.token_s, bins.square_s, bins.room, strict=True)
    ):
        within = (budget_s - load_s) / (token_s + length * square_s)
        free.append((-(within if within < room else room), i))
    free.sort()
    count, left = 0, float(tokens)
    least = min(least_tokens, tokens / len(free))
    while count < len(free) and left > 0 and -free[count][0] >= least:
        left += free[count][0]
        count += 1
    count = min(max(count * widen, 2), max(tokens // least_tokens, 2), len(free))
    while True:
        pieces = bins.fill(sorted(i for _, i in free[:count]), length, tokens)
        if pieces is not None or count == len(free):
            return pieces
        count = min(count + 1 if count < 8 else 2 * count, len(free))


def water_fill(load_s: Sequence[float], per_s: Sequence[float], room: Sequence[int], tokens: int) -> list[int] | None:
    """Whole tokens of every bin, so that those which get some end together; None if the rooms do not suffice.

    The level L solves  sum_i max(0, L - load_i) / per_i = tokens; shares above a bin's room are clipped and the rest is
    shared again.

    Args:
        per_s: seconds per token, ``[bin]``.
        room: most tokens, ``[bin]``.
    """
    if sum(most for most in room if most > 0) < tokens:
        return None
    shares, left = [0.0] * len(load_s), float(tokens)
    order = sorted([(load_s[i], i) for i, most in enumerate(room) if most > 0])
    while order:
        level_s = speed = mass = 0.0
        used = 0
        for load, i in order:
            if used and level_s <= load:
                break
            per = per_s[i]
            speed += 1 / per
            mass += load / per
            used += 1
            level_s = (left + mass) / speed
        full = set()
        for load, i in order[:used]:
            shares[i] = share = (level_s - load) / per_s[i]
            if share > room[i]:
                full.add(i)
        if not full:
            break
        for _, i in order[:used]:
            shares[i] = float(room[i]) if i in full else 0.0
        left -= sum(room[i] for i in full)
        order = [each for each in order if each[1] not in full]
    return _whole(shares, room, tokens)


def _whole(shares: Sequence[float], room: Sequence[int], tokens: int) -> list[int]:
    """Round shares to multiples of a grain, by largest remainder; one bin takes the rest below a grain."""
    indices = range(len(shares))
    busy = [i for i in indices if shares[i] > 0]
    grain = next(grain for least, grain in GRAINS if tokens >= least * len(busy))
    whole = [int(share) // grain * grain for share in shares]
    left = tokens - sum(whole)
    if not left:
        return whole
    by_remainder = sorted([(whole[i] - shares[i], i) for i in busy])
    for _, i in by_remainder:
        if left < grain:
            break
        if whole[i] + grain <= room[i]:
            whole[i] += grain
            left -= grain
    if left:  # wherever there is room
        for i in (*(i for _, i in by_remainder), *(i for i in indices if shares[i] <= 0)):
            take = min(left, max(room[i] - whole[i], 0))
            whole[i] += take
            left -= take
    return whole
