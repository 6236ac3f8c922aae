"""Checks of installed packages: planning needs the base installation, training needs the extra ``train``."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import NamedTuple

from ds_hetero.errors import DependencyError

TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")
OPTIONAL_PACKAGES = ("triton", "flash-attn")


def require(*packages: str, purpose: str) -> None:
    """Raise an error if a package is not installed. Imports none of them.

    Args:
        packages: names of the packages.
        purpose: name of the feature that needs them, for the message.

    Raises:
        DependencyError: a package is not installed; the message lists the missing ones.
    """
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise DependencyError(
            f"{purpose} needs {', '.join(packages)}; not installed: {', '.join(missing)}. "
            'Install them: pip install "ds-hetero[train]".'
        )


class Package(NamedTuple):
    """A package that ds_hetero needs or can use."""

    name: str  # name of its distribution
    release: str | None  # installed release; None if it is not installed
    tested: str  # releases with which this release of ds_hetero was tested, such as ``>=2.9,<2.14``
    is_tested: bool  # whether the installed release is one of them


def installed_packages(names: Collection[str] | None = None) -> list[Package]:
    """Return the packages that planning and training need, and those of `OPTIONAL_PACKAGES`.

    The list is empty if ds_hetero itself is not installed, as in a clone that is only on the path.

    Args:
        names: look up only these packages, since a look-up takes a millisecond; None: all.
    """
    from importlib import metadata  # importing it takes a tenth of the time of a plan

    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("ds-hetero") or ()
    except metadata.PackageNotFoundError:
        return []
    packages: dict[str, Package] = {}
    for requirement in map(Requirement, lines):
        is_listed = requirement.marker is None or requirement.name in (*TRAINING_PACKAGES, *OPTIONAL_PACKAGES)
        if is_listed and (names is None or requirement.name in names):
            release = release_of(requirement.name)
            is_tested = release is not None and requirement.specifier.contains(release, prereleases=True)
            package = Package(requirement.name, release, str(requirement.specifier), is_tested)
            packages.setdefault(requirement.name, package)
    return list(packages.values())


def release_of(name: str) -> str | None:
    """Return the installed release of a distribution; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def untested_releases() -> dict[str, str]:
    """Return a text on each installed package of `TRAINING_PACKAGES` outside its tested range, by package.

    ``{"torch": "2.15 (tested: >=2.9,<2.14)"}``.
    """
    return {
        package.name: f"{package.release} (tested: {package.tested})"
        for package in installed_packages(TRAINING_PACKAGES)
        if package.release is not None and not package.is_tested
    }


def is_installed(name: str) -> bool:
    """Return True if a package or a module can be found. Does not import it."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or a loaded module of this name has no spec
        return False
