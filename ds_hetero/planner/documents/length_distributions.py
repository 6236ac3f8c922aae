"""Distributions of document lengths, among them those that Zeppelin publishes, and batches drawn from them.

A distribution gives the share of documents in every bin of lengths. Within a bin the logarithm of the length is
uniformly distributed. Source of `DISTRIBUTIONS`: Zeppelin (EuroSys 2026, Table 2).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KIB = 1024
BINS = ((64, KIB), *((KIB << i, KIB << (i + 1)) for i in range(8)))  # tokens: 64 to 1K, 1-2K, 2-4K ... 128-256K


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthDistribution:
    """Share of the documents in every bin of lengths."""

    name: str  # for people
    bins: tuple[tuple[int, int], ...]  # smallest and largest number of tokens of every bin
    shares: tuple[float, ...]  # share of the documents, by bin; the sum need not be 1

    @classmethod
    def of_lengths(cls, name: str, lengths: Sequence[int]) -> LengthDistribution:
        """Return the distribution in which all ``lengths`` are equally likely."""
        return cls(name=name, bins=tuple((n, n) for n in lengths), shares=(1.0,) * len(lengths))

    def length(self, generator: random.Random) -> int:
        """Draw the length of one document."""
        least, most = generator.choices(self.bins, self.shares)[0]
        return int(least * (most / least) ** generator.random())

    def batch(self, tokens: int, generator: random.Random) -> list[int]:
        """Draw lengths of documents that fill a row of ``tokens`` tokens; the last document is shortened to fit."""
        lengths: list[int] = []
        while tokens:
            lengths.append(min(self.length(generator), tokens))
            tokens -= lengths[-1]
        return lengths


DISTRIBUTIONS = {
    name: LengthDistribution(name=name, bins=BINS, shares=shares)
    for name, shares in (
        ("arxiv", (0.032, 0.03, 0.08, 0.219, 0.338, 0.224, 0.077, 0.0, 0.0)),
        ("github", (0.0, 0.34, 0.095, 0.104, 0.107, 0.102, 0.088, 0.064, 0.045)),
        ("prolong64k", (0.231, 0.042, 0.021, 0.012, 0.013, 0.008, 0.673, 0.0, 0.0)),
    )
}
