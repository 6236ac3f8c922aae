"""Pictures of README.md and docs/ show what the code and the results say today."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import readme_picture
from benchmarks.long_run import pictures
from tests import docs_pictures
from tests.support import ROOT


@pytest.mark.parametrize("theme", readme_picture.THEMES)
def test_the_picture_of_unlike_ranks_shows_the_measured_speeds(theme):
    rows = readme_picture.rows_of(json.loads(readme_picture.RESULT.read_text()))
    speeds = [f"{row['tokens_per_s']:,.0f}" for row in rows.values()]
    drawn = re.findall(r">([\d,]+)</text>", readme_picture.path_of(theme).read_text())
    assert drawn == speeds, "run python -m benchmarks.readme_picture"
    readme = (ROOT / "README.md").read_text()
    assert all(speed in readme for speed in (speeds[0], speeds[-1]))


@pytest.mark.parametrize("theme", pictures.THEMES)
@pytest.mark.parametrize("name", [name for name, (result, _) in pictures.DRAWINGS.items() if result.exists()])
def test_the_picture_of_a_long_run_is_drawn_from_its_result(name, theme, tmp_path):
    result, draw = pictures.DRAWINGS[name]
    fresh = tmp_path / "fresh.svg"
    draw(json.loads(result.read_text()), theme, fresh)
    texts = [re.findall(r">([^<>]+)</text>", path.read_text()) for path in (pictures.path_of(name, theme), fresh)]
    assert len(texts[1]) > 10
    assert texts[0] == texts[1], "run python -m benchmarks.long_run.pictures"


def test_no_picture_is_stale(tmp_path: Path) -> None:
    drawn = docs_pictures.draw_all(tmp_path)
    assert docs_pictures.stale(tmp_path) == [], "run python -m tests.docs_pictures"
    assert {*drawn, *docs_pictures.BY_HAND} == {path.name for path in docs_pictures.FOLDER.glob("*.svg")}
    # A bar that is a tenth longer, with the same texts, is found.
    picture = tmp_path / docs_pictures.SCHEDULE
    path = re.search(r"L (\d+\.\d+) (\d+\.\d+) ", picture.read_text())
    assert path is not None
    picture.write_text(picture.read_text().replace(path[0], f"L {float(path[1]) * 1.1:.6f} {path[2]} "))
    assert docs_pictures.stale(tmp_path) == [docs_pictures.SCHEDULE]
