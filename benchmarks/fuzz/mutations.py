"""Mutations of valid input: at one place of its content, or of its text."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from math import inf, nan
from typing import Any

Place = tuple[str | int, ...]


def _deep() -> Any:
    value: Any = None
    for _ in range(3_000):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1.5, 1e-300, 1e300, nan, inf, -inf, 2**31, 2**53, 2**63 - 1,
    2**63, 10**30, 10**400, -(10**30), "", "x", "0", "auto", "\0", "a\0b", "\ud800", "é" * 300, "x" * 5_000,
    "a" * 10**5, [], {}, [1, 2], ["x"], [[]], {"x": 1}, [None], list(range(2_000)), _deep, {"version": 1},
    "H100-SXM-80GB", "measure", "plan",
)  # fmt: skip
_OBJECT_ONLY: tuple[Any, ...] = (object(), b"x", {1: 2}, {None: 1}, {"a"}, 1j, (1,))


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    if len(place) > 12:
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from places(child, (*place, key))


def mutate(content: Any, rng: random.Random, as_object: bool) -> tuple[Any, tuple[str, ...]]:
    """Change one place; return the content and the keys of which a message must have one."""
    place = rng.choice([place for place in places(content) if place])
    parent = content
    for key in place[:-1]:
        parent = parent[key]
    key, names = place[-1], tuple(key for key in place if isinstance(key, str))[-1:]
    how = rng.choice(("value", "value", "value", "drop", "rename", "double", "swap", "nest", "scale"))
    if how == "drop":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict):
        new = rng.choice((f"{key}s", str(key)[:-1], str(key).upper(), "\0", "x" * 1_000, "\ud800", str(key) + "é"))
        parent[new] = parent.pop(key)
        names = (str(key), new, new[:20])
    elif how == "double":
        if isinstance(parent, list):
            parent.insert(key, parent[key])
        else:
            parent[key] = [parent[key], parent[key]]
    elif how == "swap":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
        names = (*names, *([other] if isinstance(other, str) else []))
    elif how == "nest":
        parent[key] = rng.choice(([parent[key]], {str(key): parent[key]}))
    elif how == "scale" and isinstance(parent[key], (int, float)) and abs(parent[key]) < 1e300:
        parent[key] = parent[key] * rng.choice((-1, 0, 1e-12, 1e12, 10**6, 10**20, 1.0000001))
    else:
        value = rng.choice(VALUES + (_OBJECT_ONLY if as_object else ()))
        parent[key] = _deep() if value is _deep else copy.deepcopy(value)
    return content, names


def tear(text: str, rng: random.Random) -> str:
    """Damage a text as a whole."""
    at = rng.randrange(len(text) + 1)
    return rng.choice(
        (
            text[:at],
            text[at:],
            text[:at] + rng.choice(("\0", "{", "[", '"', ",", "9" * 5_000, "\ufeff", "NaN")) + text[at:],
            "[" * 100_000,
            '{"a":' * 2_000,
            text + text,
            text.replace("{", '{"version": 1, ', 1),
        )
    )
