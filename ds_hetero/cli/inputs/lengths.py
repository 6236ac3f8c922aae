"""Lengths of documents as commands take them: a JSON file, or the name of a published distribution."""

from __future__ import annotations

import random
from collections.abc import Mapping

from ds_hetero.common.reading import MAX_SEQ_LEN, is_file, is_pipe, is_whole, read_file, shortened, whole_rule
from ds_hetero.common.text import nearest
from ds_hetero.errors import PlanError
from ds_hetero.planner.documents.for_lengths import DISTRIBUTIONS, LengthDistribution

MAX_DOCUMENTS = 100_000


def read_lengths(path: str) -> list[int]:
    """Read the lengths of documents: a JSON list of tokens, or an object with such a list as ``lengths``.

    Raises:
        PlanError: no such file, or a length that is none.
    """
    data = read_file(path, "lengths", PlanError)
    if isinstance(data, Mapping):
        data = data.get("lengths")
    if not isinstance(data, list) or not 1 <= len(data) <= MAX_DOCUMENTS:
        raise PlanError(
            f"lengths file {shortened(path)} must hold a list of 1 to {MAX_DOCUMENTS:,} lengths, got {shortened(data)}."
        )
    for index, length in enumerate(data):
        if not is_whole(length, 1, MAX_SEQ_LEN):
            rule = whole_rule(length, 1, MAX_SEQ_LEN)
            raise PlanError(f"lengths file {shortened(path)}: length {index} must be {rule}, got {shortened(length)}.")
    return data


def read_distribution(source: str) -> LengthDistribution:
    """A published distribution by name, or a file of lengths of which every one is as likely.

    Raises:
        PlanError: neither a name nor a readable file.
    """
    if source in DISTRIBUTIONS and not is_file(source):
        return DISTRIBUTIONS[source]
    if not (is_file(source) or is_pipe(source)):
        close = nearest(source, DISTRIBUTIONS)
        raise PlanError(
            f"{shortened(source)} is neither a file of lengths nor a distribution"
            f"{f'; did you mean {close!r}?' if close else '.'} Distributions: {', '.join(DISTRIBUTIONS)}."
        )
    return LengthDistribution.of_lengths(source, read_lengths(source))


def draw_batches(distribution: LengthDistribution, tokens: int, count: int, seed: int) -> list[list[int]]:
    """Draw rows of ``tokens`` tokens; the same arguments give the same rows."""
    generator = random.Random(seed)
    return [distribution.batch(tokens, generator) for _ in range(count)]
