"""Compare a release of a framework that nobody has tried with the ones on record, by what ds_hetero builds on.

The record, ``surface.json``, has signatures and digests of bodies of every name that is used, release by release; of a
release it has what differs from the release before. ``python -m tests.framework_surface`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_hetero.engine.framework_source import Source, Surface, accepts_calls_of, installed, signature_of
from ds_hetero.errors import VersionError

RECORD = Path(__file__).with_name("surface.json")
Record = dict[str, dict[str, Surface]]
"""By package and release, oldest release first."""


def read_record() -> Record:
    """Return the record."""
    record: Record = {}
    for package, releases in json.loads(RECORD.read_text()).items():
        surface: Surface = {}
        for release, changed in releases.items():
            surface = {**surface, **changed}
            record.setdefault(package, {})[release] = surface
    return record


def write_record(record: Mapping[str, Mapping[str, Surface]]) -> None:
    """Write the record; of each release the names that differ from the release before."""
    written: Record = {}
    for package, releases in record.items():
        before: Surface = {}
        for release in sorted(releases, key=Version):
            surface = dict(sorted(releases[release].items()))
            changed = {name: state for name, state in surface.items() if before.get(name) != state}
            written.setdefault(package, {})[release] = changed
            before = surface
    RECORD.write_text(json.dumps(written, indent=1) + "\n")


def nearest_release(record: Mapping[str, Surface], release: str) -> str:
    """Return the newest release on record that is not newer than another one; the oldest if all are newer."""
    known = sorted(record, key=Version)
    return max((each for each in known if Version(each) <= Version(release)), key=Version, default=known[0])


def expect_known_surface(package: str, release: str, source: Source | None = None, tested: str = "") -> tuple[str, ...]:
    """Check that a release which is newer than all on record takes every call that ds_hetero makes.

    What ds_hetero calls, every release on record takes. So a new signature is enough if it takes all calls that the
    signature of any of them takes.

    Args:
        package: such as ``deepspeed``.
        release: without its build, such as ``0.19.9``.
        source: its source; None: what is installed.
        tested: releases that were tried, such as ``<5.24``. One on record that was not is compared with them.

    Returns:
        Names that are not as in any release on record, or of an older release, in any that was tried: their bodies
        differ, or they take more arguments.

    Raises:
        VersionError: names are missing, are of another kind, or have signatures that do not take the same calls.
    """
    record = read_record()[package]
    newest = max(record, key=Version)
    if Version(release) <= Version(newest):
        return _unlike_tested(record, release, SpecifierSet(tested))
    now = (source or installed(package)).surface(record[newest])
    changed, unlike = [], []
    for name, state in now.items():
        on_record = [known.get(name) for known in record.values()]
        if state in on_record:
            continue
        changed.append(name)
        if not any(old is not None and _takes_calls_of(old, state) for old in on_record):
            unlike.append(name)
    if unlike:
        then = record[newest]
        lines = "\n".join(f"  {name}: {signature_of(then[name])} -> {signature_of(now[name])}" for name in unlike)
        raise VersionError(
            f"{package} {release} was not tried, and differs from {newest} in what ds_hetero calls:\n{lines}\n"
            f"Install {package}=={newest}."
        )
    return tuple(changed)


def _unlike_tested(record: Mapping[str, Surface], release: str, tested: SpecifierSet) -> tuple[str, ...]:
    """Return the names of a release on record that are in no release that was tried as they are in it."""
    tried = [surface for known, surface in record.items() if tested.contains(known)]
    surface = record.get(release, {})
    return tuple(name for name, state in surface.items() if state not in [known.get(name) for known in tried])


def _takes_calls_of(old: str, new: str) -> bool:
    return accepts_calls_of(signature_of(old), signature_of(new))
