"""Beside which releases of which frameworks this engine installs, asked of pip's index: a table of docs/frameworks.md.

    python -m tests.versions            # asks for the newest releases, records what they require, writes the table
    python -m tests.versions --offline  # writes the table from the record, as after a change of setup.cfg

What a framework requires stands in its metadata; what this engine requires in the extra ``train`` of setup.cfg, and of
TRL, in what a job checks at its start. A release fits where every package that both name has a release in both ranges.
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
from tests.support import ROOT

RECORD = Path(__file__).with_name("versions.json")
PAGE = ROOT / "docs" / "frameworks.md"
FRAMEWORKS = {"axolotl": ("deepspeed",), "ms-swift": ("all",), "llamafactory": (), "trl": ("deepspeed", "peft")}
"""By the name of its distribution: the extras that are looked at beside what it requires."""

PACKAGES = ("deepspeed", "torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes")
_NEWEST = 2  # releases of each framework
_OLDEST = 40  # releases of each package


def own_ranges() -> dict[str, SpecifierSet]:
    """By package: the releases that this engine runs beside."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    needed = [Requirement(line) for line in config["options.extras_require"]["train"].splitlines() if line]
    return {need.name: need.specifier for need in needed} | {"trl": SpecifierSet(WORKS_BY_TOKENS)}


def ask() -> dict[str, Any]:
    """What the index says today: releases of all packages, and requirements of the frameworks' newest releases."""
    known = {name: _releases(name) for name in (*PACKAGES, *FRAMEWORKS)}
    required = {
        name: {release: _requirements(name, release) for release in known[name][:_NEWEST]} for name in FRAMEWORKS
    }
    return {"releases": {name: known[name] for name in PACKAGES}, "frameworks": required}


def _releases(name: str) -> list[str]:
    """Newest first."""
    said = _pip("index", "versions", name)
    found = re.search(r"Available versions: (.*)", said)
    assert found, said
    releases = [release for release in found[1].split(", ") if not Version(release).is_prerelease]
    return [release for release in releases if not Version(release).local][:_OLDEST]


def _requirements(name: str, release: str) -> list[str]:
    """Of `PACKAGES`, by the metadata of a release and the extras that are looked at."""
    report = json.loads(
        _pip(
            "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", f"{name}=={release}"
        )
    )
    lines = report["install"][0]["metadata"].get("requires_dist", [])
    found = []
    for need in map(Requirement, lines):
        extras = [""] if need.marker is None else ["", *FRAMEWORKS[name]]
        asked = next((e for e in extras if need.marker is None or need.marker.evaluate({"extra": e})), None)
        if need.name.lower() in PACKAGES and asked is not None:
            found.append(f"{need.name.lower()}{need.specifier}{f' [{asked}]' if asked else ''}")
    return sorted({*found})


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def newest_of_both(name: str, asked: SpecifierSet, releases: list[str], ours: dict[str, SpecifierSet]) -> str | None:
    """The newest release that a framework and this engine admit; None where there is none."""
    both = asked & ours.get(name, SpecifierSet())
    return next((release for release in releases if both.contains(release)), None)


def render(record: dict[str, Any]) -> str:
    """A row for each release of a framework."""
    lines = [
        "| framework | what both admit | without a release in both | installs beside this engine |",
        "|---|---|---|---|",
    ]
    for framework, by_release in record["frameworks"].items():
        for release, needs in by_release.items():
            lines.append(f"| {framework} {release} | {' | '.join(_row(needs, record['releases']))} |")
    return "\n".join(lines)


def _row(needs: list[str], releases: dict[str, list[str]]) -> tuple[str, str, str]:
    """Of one release: what fits, what does not, and the answer."""
    ours, asked, optional = own_ranges(), dict[str, SpecifierSet](), dict[str, bool]()
    for need in needs:
        text, _, extra = need.partition(" [")
        requirement = Requirement(text)
        asked[requirement.name] = asked.get(requirement.name, SpecifierSet()) & requirement.specifier
        optional[requirement.name] = optional.get(requirement.name, True) and bool(extra)
    newest = {name: newest_of_both(name, asked[name], releases[name], ours) for name in sorted(asked)}
    fits = [f"{name} {release}" for name, release in newest.items() if release is not None]
    clashing = [name for name, release in newest.items() if release is None]
    clashes = [f"{name} {asked[name]} (here {ours[name]})" for name in clashing]
    answer = (
        "yes"
        if not clashing
        else "without its extra"
        if all(map(optional.get, clashing))
        else "a pin must be overruled"
    )
    trl = newest.get("trl")
    answer += "; of TRL's trainers, SFTTrainer" if trl is not None and trl not in SpecifierSet(WORKS) else ""
    return ", ".join(fits), "; ".join(clashes), answer


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with the table replaced."""
    place = r"(<!-- begin installs -->\n).*?(<!-- end installs -->)"
    text, count = re.subn(place, lambda match: f"{match[1]}{render(record)}\n{match[2]}", page, flags=re.DOTALL)
    assert count == 1, f"{PAGE.name} has {count} places for the table"
    return text


def _lines(record: dict[str, Any]) -> str:
    """A package or release a line."""
    releases = ",\n".join(f"{json.dumps(name)}: {json.dumps(known)}" for name, known in record["releases"].items())
    frameworks = []
    for name, by_release in record["frameworks"].items():
        rows = ",\n".join(f"{json.dumps(release)}: {json.dumps(needs)}" for release, needs in by_release.items())
        frameworks.append(f"{json.dumps(name)}: {{\n{rows}\n}}")
    return f'{{"releases": {{\n{releases}\n}}, "frameworks": {{\n{",".join(frameworks)}\n}}}}\n'


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--offline", action="store_true", help="write the table from the record")
    if not parser.parse_args().offline:
        RECORD.write_text(_lines(ask()))
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
