"""Requirements of optional parts: planning takes the base installation, training the extra ``train``."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import NamedTuple

from ds_hetero.errors import DependencyError

TRAINING = ("torch", "deepspeed", "transformers", "accelerate")
OPTIONAL = ("triton", "flash-attn")


def require(*packages: str, purpose: str) -> None:
    """Check that packages are installed, without importing them. Raises `DependencyError`: what is missing.

    Args:
        purpose: what needs them, as the subject of a sentence.
    """
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise DependencyError(
            f"{purpose} needs {', '.join(packages)}; not installed: {', '.join(missing)}. "
            'Install them: pip install "ds-hetero[train]".'
        )


class Package(NamedTuple):
    """A package that ds_hetero needs or can use."""

    name: str  # of its distribution
    release: str | None  # that is installed; None where none is
    tested: str  # releases that this one of ds_hetero was tested with, such as ``>=2.9,<2.14``
    is_tested: bool  # the installed release is one of them


def installed_packages(names: Collection[str] | None = None) -> list[Package]:
    """Return what planning and training need and `OPTIONAL`; empty where ds_hetero runs without being installed.

    Args:
        names: look up these alone; a look-up takes a millisecond.
    """
    from importlib import metadata  # takes as long to import as a tenth of what a plan takes

    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("ds-hetero") or ()
    except metadata.PackageNotFoundError:
        return []
    packages: dict[str, Package] = {}
    for needed in map(Requirement, lines):
        is_ours = needed.marker is None or needed.name in (*TRAINING, *OPTIONAL)
        if is_ours and (names is None or needed.name in names):
            release = release_of(needed.name)
            is_tested = release is not None and needed.specifier.contains(release, prereleases=True)
            packages.setdefault(needed.name, Package(needed.name, release, str(needed.specifier), is_tested))
    return list(packages.values())


def release_of(name: str) -> str | None:
    """Return the installed release of a distribution; None where none is."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def untested_releases() -> dict[str, str]:
    """Return installed releases of `TRAINING` outside the tested ranges: by package, its release and the range."""
    return {
        package.name: f"{package.release} (tested: {package.tested})"
        for package in installed_packages(TRAINING)
        if package.release is not None and not package.is_tested
    }


def is_installed(name: str) -> bool:
    """Whether a package or a module can be imported, without an import of it."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that refuses it, or a module without a spec in its place
        return False
