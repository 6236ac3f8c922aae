"""Write a table of docs/frameworks.md: which releases of which frameworks can be installed beside this engine.

    python -m tests.versions            # asks pip's index for the newest releases, records them, writes the table
    python -m tests.versions --offline  # writes the table from the record, as after a change of setup.cfg

Requirements of a framework are in its metadata. Those of this engine are in the extra ``train`` of setup.cfg, and for
TRL in a check at the start of a job. A release can be installed if every package that both require has a release in
both ranges.
"""

from __future__ import annotations

import argparse
import configparser
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_hetero.frameworks.trl.names import WORKS, WORKS_BY_TOKENS
from tests.generated_places import with_generated
from tests.support import ROOT

RECORD = Path(__file__).with_name("versions.json")
PAGE = ROOT / "docs" / "frameworks.md"
FRAMEWORKS = {"axolotl": ("deepspeed",), "ms-swift": ("all",), "llamafactory": (), "trl": ("deepspeed", "peft")}
"""By the name of its distribution: the extras that are looked at beside what it requires."""

PACKAGES = ("deepspeed", "torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes")
_COLUMNS = ("torch", "transformers", "accelerate", "deepspeed", "trl", "peft", "bitsandbytes")
_NEWEST = 2  # releases of each framework
_OLDEST = 40  # releases of each package


def own_ranges() -> dict[str, SpecifierSet]:
    """Return by package the releases that this engine runs with."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    needed = [Requirement(line) for line in config["options.extras_require"]["train"].splitlines() if line]
    return {need.name: need.specifier for need in needed} | {"trl": SpecifierSet(WORKS_BY_TOKENS)}


def ask() -> dict[str, Any]:
    """Ask the index: return releases of all packages, and requirements of the frameworks' newest releases."""
    releases = {name: _releases(name) for name in (*PACKAGES, *FRAMEWORKS)}
    required = {
        name: {release: _requirements(name, release) for release in releases[name][:_NEWEST]} for name in FRAMEWORKS
    }
    return {"releases": {name: releases[name] for name in PACKAGES}, "frameworks": required}


def _releases(name: str) -> list[str]:
    """Return the releases of a package, newest first."""
    printed = _pip("index", "versions", name)
    match = re.search(r"Available versions: (.*)", printed)
    assert match, printed
    releases = [release for release in match[1].split(", ") if not Version(release).is_prerelease]
    return [release for release in releases if not Version(release).local][:_OLDEST]


def _requirements(name: str, release: str) -> list[str]:
    """Return what a release requires of `PACKAGES`, by its metadata and the extras of `FRAMEWORKS`."""
    report = json.loads(
        _pip(
            "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", f"{name}=={release}"
        )
    )
    lines = report["install"][0]["metadata"].get("requires_dist", [])
    requirements = []
    for need in map(Requirement, lines):
        extras = [""] if need.marker is None else ["", *FRAMEWORKS[name]]
        asked = next((e for e in extras if need.marker is None or need.marker.evaluate({"extra": e})), None)
        if need.name.lower() in PACKAGES and asked is not None:
            requirements.append(f"{need.name.lower()}{need.specifier}{f' [{asked}]' if asked else ''}")
    return sorted({*requirements})


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def newest_of_both(name: str, asked: SpecifierSet, releases: list[str], ours: dict[str, SpecifierSet]) -> str | None:
    """Return the newest release that a framework and this engine both admit; None if there is none."""
    both = asked & ours.get(name, SpecifierSet())
    return next((release for release in releases if both.contains(release)), None)


def render(record: dict[str, Any]) -> str:
    """Return a table with a row for each release of a framework, and a list of the conflicts."""
    lines, conflicts = [f"| framework | installs | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 2) + "|"], []
    for framework, by_release in record["frameworks"].items():
        for release, needs in by_release.items():
            name = f"{framework} {release}"
            pins = [*needs, f"trl=={release}"] if framework == "trl" else needs
            cells, clashes = _row(pins, record["releases"])
            lines.append(f"| {name} | {' | '.join(cells)} |")
            conflicts += [f"* {name}: {clash}" for clash in clashes]
    return "\n".join([*lines, "", *conflicts])


def _row(needs: list[str], releases: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Return of one release the verdict with the newest version of every package, and the packages that clash."""
    ours, asked, optional = own_ranges(), dict[str, SpecifierSet](), dict[str, bool]()
    for need in needs:
        text, _, extra = need.partition(" [")
        requirement = Requirement(text)
        asked[requirement.name] = asked.get(requirement.name, SpecifierSet()) & requirement.specifier
        optional[requirement.name] = optional.get(requirement.name, True) and bool(extra)
    newest = {name: newest_of_both(name, asked[name], releases[name], ours) for name in sorted(asked)}
    clashing = [name for name, release in newest.items() if release is None]
    clashes = [f"{name} `{asked[name]}`, ds_hetero `{ours[name]}`" for name in clashing]
    answer = "override a pin"
    if all(map(optional.get, clashing)):
        answer = "without its extra" if clashing else "yes"
    cells = {name: "conflict" if release is None else release for name, release in newest.items()}
    trl = newest.get("trl")
    if trl is not None and trl not in SpecifierSet(WORKS):
        cells["trl"] = f"{trl} (SFT)"
    return [answer, *(cells.get(name, "") for name in _COLUMNS)], clashes


def with_table(page: str, record: dict[str, Any]) -> str:
    """Return the page with the table replaced."""
    return with_generated(page, "installs", render(record))


def _lines(record: dict[str, Any]) -> str:
    """Return the record as JSON with one package or release per line."""
    releases = ",\n".join(f"{json.dumps(name)}: {json.dumps(known)}" for name, known in record["releases"].items())
    frameworks = []
    for name, by_release in record["frameworks"].items():
        rows = ",\n".join(f"{json.dumps(release)}: {json.dumps(needs)}" for release, needs in by_release.items())
        frameworks.append(f"{json.dumps(name)}: {{\n{rows}\n}}")
    return f'{{"releases": {{\n{releases}\n}}, "frameworks": {{\n{",".join(frameworks)}\n}}}}\n'


def main() -> None:
    """Run the command, see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--offline", action="store_true", help="write the table from the record")
    if not parser.parse_args().offline:
        RECORD.write_text(_lines(ask()))
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
