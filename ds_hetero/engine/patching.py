"""Replace attributes of a framework's modules and classes, and restore them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_hetero.common.extras import installed_packages
from ds_hetero.engine.surface import expect_known_surface
from ds_hetero.errors import VersionError

Function = Callable[..., Any]
"""A function of a framework without type information."""


class Patches:
    """Records replacements; `undo` restores the former values, the latest replacement first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``make(original)``.

        On a class the original is the plain function, or the classmethod object, in its dictionary, not a bound method.
        Code that has imported the class before sees the replacement.
        """
        original = vars(owner)[name]
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original))

    def add(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name``, which is not in the dictionary of ``owner``; `undo` deletes it."""
        assert name not in vars(owner), (owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name))

    def on_undo(self, action: Callable[[], None]) -> None:
        """Let `undo` call ``action`` as well."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore everything; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


def around(hook: Function, *context: object) -> Callable[[Function], Function]:
    """Return a function for `Patches.replace` that replaces ``stock`` by a call of ``hook``.

    Args:
        hook: called as ``hook(*context, stock, *args, **kwargs)``. It may call ``stock``; its result is returned.
        context: first arguments of the hook.
    """

    def make_replacement(stock: Function) -> Function:
        @functools.wraps(stock)
        def call(*args: object, **kwargs: object) -> object:
            return hook(*context, stock, *args, **kwargs)

        return call

    return make_replacement


def expect_package(package: str, works: str, names: Iterable[str]) -> tuple[str, ...]:
    """Check a framework's version, and that it has what ds_hetero uses.

    Args:
        works: versions that work, such as ``">=0.18.4"``.
        names: private names, as ``"module:attribute"`` or ``"module:Class.attribute"``.

    Returns:
        Names that are not as in any release that was tried, if this one was not; see `expect_known_surface`.

    Raises:
        VersionError: it is another version, names are missing, or a version that was not tried has other signatures.
    """
    if not SpecifierSet(works).contains(version(package), prereleases=True):
        raise VersionError(f"{package} {version(package)} is not a version that works. Install {package}{works}.")
    missing = [name for name in names if not _exists(name)]
    if missing:
        raise VersionError(
            f"{package} {version(package)} does not have {', '.join(missing)}, which ds_hetero uses. "
            f"Install {package}{works}."
        )
    known = installed_packages([package])
    if any(each.is_tested for each in known):
        return ()
    tested = known[0].tested if known else ""
    return expect_known_surface(package, Version(version(package)).public, tested=tested)


def _exists(name: str) -> bool:
    """Return whether a name as in `expect_package` can be imported."""
    module, _, attributes = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            owner = getattr(owner, attribute)
    except (ImportError, AttributeError):
        return False
    return True
