"""Draw the pictures of README.md and docs/ again: ``python -m tests.docs_pictures [--check]``.

They are those of `benchmarks.readme_picture` and `benchmarks.long_run.pictures`, from their measured results, and of
the command below "A plan as a picture" in docs/index.md. With ``--check`` nothing is written; the command names the
pictures that are not what it would draw, and ends with 1. CI does the same in `tests.unit.test_docs_pictures`.

Pictures of docs/images/papers are drawn by ``python -m benchmarks.reproduce all``, which computes for minutes. The two
drawings of docs/how-it-works.md show no numbers and are drawn by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path

from benchmarks import readme_picture
from benchmarks.long_run import pictures as long_run
from ds_hetero.cli import main as ds_hetero
from tests.support import ROOT

FOLDER = ROOT / "docs" / "images"
SCHEDULE = "schedule.svg"
# Pictures of this folder that no command draws.
BY_HAND = ("attention-layer.svg", "how-it-works.svg")
_COMMAND = re.compile(rf"^ds-hetero (show .*)--out {re.escape(SCHEDULE)}$", re.MULTILINE)
# Coordinates of another release of matplotlib or of its fonts differ in the last digits.
_NUMBERS = re.compile(r"-?\d+\.\d+")


def draw_all(folder: Path) -> list[str]:
    """Draw every picture into a folder, and return their names."""
    result = json.loads(readme_picture.RESULT.read_text())
    for theme in readme_picture.THEMES:
        readme_picture.draw(result, theme, folder)
    for name, (measured, draw) in long_run.DRAWINGS.items():
        for theme in long_run.THEMES if measured.exists() else ():
            draw(json.loads(measured.read_text()), theme, folder / long_run.path_of(name, theme).name)
    (command,) = _COMMAND.findall((ROOT / "docs" / "index.md").read_text())
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = ds_hetero([*command.split(), "--out", str(folder / SCHEDULE)])
        except SystemExit as end:
            code = end.code
    assert not code, f"ds-hetero {command}"
    return sorted(path.name for path in folder.iterdir())


def stale(fresh: Path) -> list[str]:
    """Return the names of pictures in docs/images that are missing, or not as those in the folder ``fresh``."""
    names = []
    for path in sorted(fresh.iterdir()):
        shown = FOLDER / path.name
        if not shown.is_file() or _compared(shown) != _compared(path):
            names.append(path.name)
    return names


def _compared(path: Path) -> str:
    """Return the text of an SVG with numbers to one digit behind the point, and without matplotlib's version."""
    text = re.sub(r"<metadata>.*?</metadata>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return _NUMBERS.sub(lambda match: f"{float(match[0]):.1f}", text)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs_pictures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; name pictures that are stale")
    options = parser.parse_args()
    if not options.check:
        with tempfile.TemporaryDirectory() as folder:
            for name in draw_all(Path(folder)):
                (FOLDER / name).write_bytes((Path(folder) / name).read_bytes())
                print(f"written to {FOLDER / name}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        draw_all(Path(folder))
        names = stale(Path(folder))
    for name in names:
        print(f"stale: docs/images/{name}; python -m tests.docs_pictures draws it")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
