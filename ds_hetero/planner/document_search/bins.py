"""Deal documents to bins of unequal speed: whole if they fit into a time budget, else cut over a few bins.

A bin is a unit, or a node with the speed of all its units. `deal` takes documents longest first, as Zeppelin does
(EuroSys 2026, Algorithms 1 and 2), with seconds in place of tokens. `water_fill` shares one document so that all bins
that get a part of it end at the same time.

Example: two bins of 1 ms per token, attention left out, a budget of 10 s, documents of 12,000, 4,000 and 3,000 tokens.
The first would take 12 s and is cut into 6,000 and 6,000. The second goes to bin 0, which then has 10 s of work. The
third goes to bin 1, which then has 9 s.

Every rank has to come to the same result. So the only operations are + - * / and comparisons in a fixed order, and
`math.fsum`, which is exact. Python's own sum of floats differs between its versions, numpy's between CPUs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ds_hetero.planner.document_search.unit_costs import Pieces

Queue = list[tuple[float, int]]
"""Seconds of work so far and index of every bin of a kind, ascending."""

# Chosen, never measured alone; `python -m benchmarks.documents plan` says how far placements with them are from the
# ideal.
SAME_KIND = 1.02  # ratio of costs up to which bins are in one queue
LEAST_FRAGMENT_TOKENS = 256  # usual least length of a fragment
GRAINS = ((4096, 64), (0, 16))  # (least mean tokens of a fragment, grain: fragments are multiples of so many tokens)
_SMALL_RING = 8  # a ring without room grows by one bin up to this number of bins, and doubles beyond it


class DocumentPart(NamedTuple):
    """A document, or a node's share of one, that is dealt to bins."""

    document: int  # index of the document
    length: int  # tokens of the whole document; a token's attention takes time in proportion to it
    tokens: int  # tokens to deal, at most ``length``


@dataclass(slots=True)
class Bins:
    """Costs of bins, and the work and tokens that they have so far."""

    token_s: list[float]  # seconds per token outside attention, ``[bin]``
    square_s: list[float]  # seconds of attention per token and token of its document, ``[bin]``
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
        """Share ``tokens`` of a document over the bins of ``ring`` so that they end together, and add the shares.

        Returns the bins that get tokens, with their tokens; None, and nothing is added, if the bins have no room.
        """
        load_s, room = self.load_s, self.room
        s_per_token = [self.token_s[i] + length * self.square_s[i] for i in ring]
        shares = water_fill([load_s[i] for i in ring], s_per_token, [room[i] for i in ring], tokens)
        if shares is None:
            return None
        pieces = []
        for i, share, seconds in zip(ring, shares, s_per_token, strict=True):
            if share:
                load_s[i] += share * seconds
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
    """Deal parts to bins, and return the bins of every part with their tokens; None if the bins have no room.

    A part goes to the bin that ends first with it, if that bin ends within the budget; else the part is cut over
    several bins.

    Args:
        parts: parts to deal, longest first.
        bins: bins that get the parts; they are changed in place.
        budget_s: time within which a bin has to end to take a whole part.
        least_tokens: least length of a fragment, where possible; parts shorter than twice this length are not cut.
        widen: ratio of the bins that a part is cut over to the bins that it needs.
    """
    queues = _Queues(bins)
    kinds, load_s, room, bin_tokens = queues.kinds, bins.load_s, bins.room, bins.tokens
    pieces_by_part: list[Pieces] = []
    (token_s, square_s, queue), *other_kinds = kinds
    for part in parts:
        _, length, tokens = part
        # Usually all bins are of one kind: then the first bin of the only queue ends first.
        first_load_s, i = queue[0]
        if other_kinds or room[i] < tokens:
            end_s, i, queue = _first_to_end(kinds, room, length, tokens)
        else:
            end_s = first_load_s + tokens * (token_s + length * square_s)
        has_room = end_s < inf
        if has_room and (end_s <= budget_s or tokens < 2 * least_tokens):
            entry = load_s[i], i
            if queue[0] == entry:
                del queue[0]
            else:
                queue.remove(entry)
            # As `Bins.put`, without the call: this loop is most of the time of planning.
            load_s[i] += tokens * (bins.token_s[i] + length * bins.square_s[i])
            bin_tokens[i] += tokens
            room[i] -= tokens
            insort(queue, (load_s[i], i))
            pieces_by_part.append([(i, tokens)])
            continue
        earlier_load_s = load_s.copy()
        pieces = _cut(part, bins, budget_s, least_tokens, widen)
        if pieces is None:
            return None
        for i, _ in pieces:
            queues.move(i, earlier_load_s[i])
        pieces_by_part.append(pieces)
    return pieces_by_part


class _BinKind(NamedTuple):
    """Bins of about the same speed, with the costs of the fastest of them."""

    token_s: float  # seconds per token outside attention
    square_s: float  # seconds of attention per token and token of its document
    queue: Queue  # the bins of this kind, least load first


def _first_to_end(kinds: Sequence[_BinKind], room: Sequence[int], length: int, tokens: int) -> tuple[float, int, Queue]:
    """Find the bin that ends first if it gets ``tokens`` of a document of ``length``.

    Returns:
        The time at which the bin ends, its index, and its queue; infinity and -1 if no bin has room.
    """
    first_end_s, first_bin, first_queue = inf, -1, kinds[0].queue
    for token_s, square_s, queue in kinds:
        load_s, i = queue[0]
        if load_s >= first_end_s:  # all bins of this queue end later
            continue
        if room[i] < tokens:
            load_s, i = next((entry for entry in queue if room[entry[1]] >= tokens), (inf, -1))
        end_s = load_s + tokens * (token_s + length * square_s)
        if end_s < first_end_s:
            first_end_s, first_bin, first_queue = end_s, i, queue
    return first_end_s, first_bin, first_queue


class _Queues:
    """Bins sorted by load, one queue for each kind of bins; the first bin of a queue ends first of its kind.

    A part is dealt by a look at the first bin of every queue, and not at all bins.

    Attributes:
        kinds: kinds of bins with their queues, fastest bins first.
    """

    def __init__(self, bins: Bins) -> None:
        self._load_s = bins.load_s
        self.kinds: list[_BinKind] = []
        self._queue_of_bin: list[Queue] = [[]] * len(bins.load_s)
        max_token_s = max_square_s = 0.0  # costs up to which a bin is of the same kind as the one before
        for token_s, square_s, i in sorted(zip(bins.token_s, bins.square_s, range(len(bins.token_s)), strict=True)):
            if token_s > max_token_s or square_s > max_square_s or square_s < self.kinds[-1].square_s:
                self.kinds.append(_BinKind(token_s, square_s, []))
                max_token_s, max_square_s = SAME_KIND * token_s, SAME_KIND * square_s
            self._queue_of_bin[i] = self.kinds[-1].queue
            self._queue_of_bin[i].append((bins.load_s[i], i))
        for kind in self.kinds:
            kind.queue.sort()

    def move(self, i: int, earlier_load_s: float) -> None:
        """Put bin ``i`` at its new place in its queue, after its load has changed from ``earlier_load_s``."""
        queue = self._queue_of_bin[i]
        del queue[bisect_left(queue, (earlier_load_s, i))]
        insort(queue, (self._load_s[i], i))


def _cut(part: DocumentPart, bins: Bins, budget_s: float, least_tokens: int, widen: int) -> Pieces | None:
    """Cut a part over the fewest bins that take it within the budget, or over more bins if these have no room.

    The arguments are those of `deal`. Returns the bins with their tokens; None if all bins together have no room.
    """
    _, length, tokens = part
    # (negative tokens that a bin takes within the budget, bin), the largest capacity first.
    by_capacity: list[tuple[float, int]] = []
    for i, (load_s, token_s, square_s, room) in enumerate(
        zip(bins.load_s, bins.token_s, bins.square_s, bins.room, strict=True)
    ):
        within_budget = (budget_s - load_s) / (token_s + length * square_s)
        by_capacity.append((-(within_budget if within_budget < room else room), i))
    by_capacity.sort()
    least_capacity = min(least_tokens, tokens / len(by_capacity))
    num_needed, tokens_left = 0, float(tokens)
    for negative_capacity, _ in by_capacity:
        if tokens_left <= 0 or -negative_capacity < least_capacity:
            break
        tokens_left += negative_capacity
        num_needed += 1
    # At least two bins, since it is cut; no more than give fragments of `least_tokens`.
    num_bins = min(max(num_needed * widen, 2), max(tokens // least_tokens, 2), len(by_capacity))
    while True:
        pieces = bins.fill(sorted(i for _, i in by_capacity[:num_bins]), length, tokens)
        if pieces is not None or num_bins == len(by_capacity):
            return pieces
        num_bins = min(num_bins + 1 if num_bins < _SMALL_RING else 2 * num_bins, len(by_capacity))


def water_fill(
    load_s: Sequence[float], s_per_token: Sequence[float], room: Sequence[int], tokens: int
) -> list[int] | None:
    """Share tokens so that all bins that get tokens end at the same time.

    The time T at which the bins end solves  sum_i max(0, T - load_i) / s_per_token_i = tokens. A bin that would get
    more than its room gets its room, and the others share the remainder again. Example: loads of 0 s and 4 s, 1 s per
    token, 10 tokens: the bins end at (10 + 0 + 4) / 2 = 7 s, so they get 7 and 3 tokens, before rounding to `GRAINS`.

    Args:
        load_s: seconds of work so far, ``[bin]``.
        s_per_token: seconds per token, ``[bin]``.
        room: tokens that still fit, ``[bin]``.

    Returns:
        Whole tokens by bin; None if the bins have no room.
    """
    if sum(limit for limit in room if limit > 0) < tokens:
        return None
    shares, tokens_left = [0.0] * len(load_s), float(tokens)
    by_load = sorted([(load_s[i], i) for i, limit in enumerate(room) if limit > 0])
    while by_load:
        # Bins are used in the order of their loads, as long as the next one's load is below the time T.
        end_s = tokens_per_s = load_tokens = 0.0  # T; speed of the used bins; their loads, as tokens at their speeds
        num_used = 0
        for load, i in by_load:
            if num_used and end_s <= load:
                break
            seconds = s_per_token[i]
            tokens_per_s += 1 / seconds
            load_tokens += load / seconds
            num_used += 1
            end_s = (tokens_left + load_tokens) / tokens_per_s
        full_bins = set()
        for load, i in by_load[:num_used]:
            shares[i] = share = (end_s - load) / s_per_token[i]
            if share > room[i]:
                full_bins.add(i)
        if not full_bins:
            break
        for _, i in by_load[:num_used]:
            shares[i] = float(room[i]) if i in full_bins else 0.0
        tokens_left -= sum(room[i] for i in full_bins)
        by_load = [entry for entry in by_load if entry[1] not in full_bins]
    return _in_grains(shares, room, tokens)


def _in_grains(shares: Sequence[float], room: Sequence[int], tokens: int) -> list[int]:
    """Round shares to multiples of a grain (see `GRAINS`), by largest remainder, so that they sum to ``tokens``.

    Tokens that do not fill a grain, or for whose grain no bin has room, go to the first bins that have room.
    """
    indices = range(len(shares))
    busy = [i for i in indices if shares[i] > 0]
    grain = next(grain for least_mean, grain in GRAINS if tokens >= least_mean * len(busy))
    rounded = [int(share) // grain * grain for share in shares]
    tokens_left = tokens - sum(rounded)
    if not tokens_left:
        return rounded
    by_remainder = sorted(busy, key=lambda i: (rounded[i] - shares[i], i))  # the largest remainder first
    for i in by_remainder:
        if tokens_left < grain:
            break
        if rounded[i] + grain <= room[i]:
            rounded[i] += grain
            tokens_left -= grain
    if tokens_left:
        idle = [i for i in indices if shares[i] <= 0]
        for i in (*by_remainder, *idle):
            added = min(tokens_left, max(room[i] - rounded[i], 0))
            rounded[i] += added
            tokens_left -= added
    return rounded
