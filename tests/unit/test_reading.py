"""Files that people write are read by one reader, which lets plain, finite, bounded data through and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.common.reading import MAX_DEPTH, check_content, parse, read_file, shortened
from ds_hetero.errors import ClusterError, ScheduleError
from tests.work import lines_run

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x00\x85\u2028\u2029\ufeff", categories=("L", "N"))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_plain_data_comes_back_as_it_was_written(content: Any) -> None:
    assert parse(json.dumps(content), "here", ScheduleError) == content


def test_yaml_is_read_as_yaml_and_dates_as_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes: &all [{name: a, since: 2020-99-99}]\nagain: *all\n")
    node = {"name": "a", "since": "2020-99-99"}
    assert read_file(path, "cluster", ClusterError) == {"nodes": [node], "again": [node]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[" * 100_000, "nested more than"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "nested more than"),
        ('{"a": NaN}', "a is nan; numbers must be finite"),
        ('{"a": -Infinity}', "must be finite"),
        ('{"a": {"b": 1e999}}', r"a\.b is inf"),
        ('{"a": ' + "9" * 5_000 + "}", "fit into 64 bits"),
        ('{"a": [0, 9223372036854775808]}', r"a\.1 is 9223372036854775808"),
        ('{"a": ', "is not JSON"),
        ("", "is not JSON"),
    ],
)
def test_json_that_is_not_plain_data_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as raised:
        parse(text, "schedule file x.json", ScheduleError)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "'a' is given twice"),
        ("[" * 100_000, "nested more than"),
        ("a: .nan\n", "a is nan"),
        ("a: [1, .inf]\n", r"a\.1 is inf"),
        ("1: a\n", "key 1 must be text"),
        ("a: !!python/object/apply:os.system [true]\n", "is not YAML"),
        ("a: !!binary aGk=\n", "a is a bytes"),
        ("a: !!set {x}\n", "a is a set"),
        ("a: &a [*a]\n", r"alias \*a refers to an anchor that does not exist or is not complete"),
        ("a: [1\n", "is not YAML"),
        ("? [a]\n: b\n", "is not YAML"),
    ],
)
def test_yaml_that_is_not_plain_data_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as raised:
        parse(text, "cluster file x.yaml", ClusterError, yaml=True)
    assert len(str(raised.value)) < 500


def test_aliases_that_expand_to_billions_of_values_are_refused_at_once() -> None:
    lines = ["x0: &x0 [0, 0, 0, 0, 0, 0, 0, 0, 0]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 10)]

    def read() -> None:
        with pytest.raises(ClusterError, match="more than 2,000,000 values"):
            parse("\n".join(lines), "cluster file x.yaml", ClusterError, yaml=True)

    assert lines_run(read) < 10_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.json", "No such file"),
        ("", "Is a directory"),
        ("a\0b", "null"),
        ("x" * 300, "name too long"),
        ("binary.json", "utf-8"),
        ("loop.json", "symbolic links"),
        ("large.json", "has 20,002 bytes; at most 10,000 are read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "large.json").write_text("[]" + " " * 20_000)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    os.symlink(tmp_path / "loop.json", tmp_path / "loop.json")
    with pytest.raises(ScheduleError, match=message):
        read_file(tmp_path / name, "schedule", ScheduleError, max_bytes=10_000)


def test_content_given_as_an_object_may_hold_what_a_file_can() -> None:
    check_content({"a": [1, 2.5, None, True, "x", (1, 2)]}, "the section", ScheduleError)


def _nested(depth: int, width: int = 1) -> Any:
    nested: Any = []
    for _ in range(depth):
        nested = [nested] * width
    return nested


@pytest.mark.parametrize(
    ("content", "message"),
    [({1: 2}, "must be text"), ({"a": object()}, "a is a object"), (_nested(3_000), "nested")],
    ids=["key", "object", "nested"],
)
def test_content_given_as_an_object_is_held_to_the_same_rules(content: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_content(content, "the section", ScheduleError)


@pytest.mark.parametrize(
    "value",
    [_nested(9, 9), "x" * 10**6, 10**400, {i: i for i in range(10**5)}],
    ids=["nested", "text", "number", "object"],
)
def test_values_are_shown_shortened(value: Any) -> None:
    assert len(shortened(value)) <= 200
    assert lines_run(lambda: shortened(value)) < 20_000
