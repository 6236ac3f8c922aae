"""What is kept of a measurement, for how long that is said to be ago, and what counts as a busy machine."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ds_hetero.cli.app import app
from ds_hetero.common.units import GIB
from ds_hetero.profiler import cache
from ds_hetero.profiler.cluster_file import RankFacts, cluster_content, fingerprint
from ds_hetero.profiler.machine import CpuUse, CpuWatch, Quietness, busy_reason, quietness_of
from tests.unit.profiler.test_profiler_fit import timed

RANK = RankFacts(node="a", host="a", device="CPU", memory_bytes=4 * GIB, torch="2", dtype="float32", attention="torch")


def _profile(**changes: Any) -> dict[str, Any]:
    profile = {"version": 1, "fingerprint": fingerprint([RANK]), "measured_at": "2026-11-22T08:00:00+00:00"}
    return {"nodes": [{"name": "a", "device": "CPU"}], "profile": {**profile, **changes}}


def test_other_processes_are_what_the_ranks_of_a_host_do_not_account_for() -> None:
    uses = [CpuUse("a", 3.5, 1.0, 4), CpuUse("a", 3.4, 1.5, 4), CpuUse("b", 1.0, 1.1, 8)]
    assert quietness_of(uses, [[1.0, 1.1], [2.0, 2.0], []]) == Quietness(0.25, pytest.approx(0.1))
    assert quietness_of([CpuUse("a", None, 1.0, 4)], [[1.0]]) == Quietness(None, 0.0)


def test_the_use_of_the_cores_is_read_from_the_system() -> None:
    watch = CpuWatch("a")
    until = datetime.now() + timedelta(seconds=0.2)
    while datetime.now() < until:
        pass
    use = watch.read()
    assert use.host == "a" and 0 < use.own_cores < 1.5
    assert use.busy_cores is not None and 0 <= use.busy_cores <= use.num_cores * 1.2


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"others_share": 0.2, "spread": 0.2}, None),
        ({"others_share": None, "spread": 0.0}, None),
        ({"others_share": 0.6, "spread": 0.0}, "other processes kept 60% of the cores busy, above 25%"),
        ({"others_share": 0.6, "spread": 0.5}, "60% of the cores busy, above 25% and equal timings differed by 50%"),
    ],
)
def test_a_busy_machine_is_one_above_the_bounds(machine: dict[str, Any], reason: str | None) -> None:
    found = busy_reason({"machine": machine})
    assert found is reason if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (timedelta(days=3, hours=2), "3 days ago"),
        (timedelta(hours=1), "1 hour ago"),
        (timedelta(seconds=5), "less than a minute ago"),
    ],
)
def test_the_age_of_a_profile_is_said_with_the_remedy(age: timedelta, text: str) -> None:
    taken = datetime.now(timezone.utc) - age
    said = cache.describe_age(_profile(measured_at=taken.isoformat()), False)
    assert said.startswith(f"as measured before, {text} ({taken:%Y-%m-%d %H:%M} UTC)")
    assert "ds-hetero profile --again" in said


@pytest.mark.parametrize(
    "changes",
    [{"measured_at": None}, {"measured_at": "yesterday"}, {"measured_at": "2026-11-22T08:00:00"}, {"machine": [1]}],
)
def test_a_profile_without_a_date_is_measured_anew(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As earlier versions kept it, or changed by hand."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(_profile()))
    assert cache.read_profile(path, [RANK]) is not None
    path.write_text(json.dumps(_profile(**changes)))
    with caplog.at_level(logging.WARNING):
        assert cache.read_profile(path, [RANK]) is None
    assert "measuring anew" in caplog.text


def _lower(content: dict[str, Any], *keys: str) -> None:
    *place, last = keys
    for key in place:
        content = content[key]
    content[last] = 1e-3


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("memory_gib",), "it gives rank 0 a memory of 0.0 GiB, and the rank has 4.0"),
        (("peak_tflops",), "its peak_flops_per_s is not what its own timings give"),
        (("efficiency", "matmul"), "its efficiencies are not what its own timings give"),
    ],
)
def test_a_profile_with_numbers_that_are_not_the_ranks_is_measured_anew(
    keys: tuple[str, ...], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.json"
    samples = [{**timed(), "links": {}}]
    content = cluster_content([RANK], samples, {"measured_at": "2026-11-22T08:00:00+00:00"})
    path.write_text(json.dumps(content))
    assert cache.read_profile(path, [RANK]) == content
    _lower(content["devices"]["CPU"], *keys)
    path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        assert cache.read_profile(path, [RANK]) is None
    assert says in caplog.text and "measuring anew" in caplog.text


def test_it_is_said_where_a_profile_is_kept_and_that_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = _profile()
    path = cache._profile_file(cache.cache_folder(), [RANK])
    assert path is not None
    tmp_path.joinpath("cache").write_text("a file where the folder should be")
    cache._write(path, content)
    assert (
        cache.describe_age(content, True)
        == "measured now; the profile could not be kept, so the next job measures anew"
    )
    tmp_path.joinpath("cache").unlink()
    cache._write(path, content)
    assert cache.describe_age(content, True) == f"measured now; profiles are kept in {path.parent}"


def test_what_trains_is_part_of_the_key() -> None:
    ranks = [
        RANK,
        replace(RANK, head_dim=64),
        replace(RANK, head_dim=128),
        replace(RANK, head_dim=64, softcap=30.0),
        replace(RANK, head_dim=64, dtype="bfloat16"),
    ]
    assert len({fingerprint([rank]) for rank in ranks}) == len(ranks)


def test_profile_again_deletes_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "ds_hetero"
    folder.mkdir()
    Path(folder, "p.json").write_text("{}")
    result = CliRunner().invoke(app, ["profile", "--again"])
    assert result.exit_code == 0 and "1 profile in" in result.output and "measures anew" in result.output
    assert not list(folder.iterdir())
