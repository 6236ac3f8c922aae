"""Replacing names of a framework, and putting them back."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet

from ds_hetero.errors import VersionError

Function = Callable[..., Any]
"""A function of a framework that has no types."""


class Patches:
    """Replacements made so far; `undo` restores what was there, latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``make(what it was)``.

        On a class, what it was is the plain function or class method found there, not a bound one, and callers that
        imported the class earlier see the replacement.
        """
        original = vars(owner)[name]
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original))

    def add(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name``, which ``owner`` itself does not have; `undo` deletes it."""
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
    """Make the replacement that `Patches.replace` takes of ``hook(*context, stock, *args, **kwargs)``.

    Args:
        hook: calls ``stock``, or does not, and returns what the caller of ``stock`` gets.
        context: what the hook needs beside the call.
    """

    def replacement_of(stock: Function) -> Function:
        @functools.wraps(stock)
        def call(*args: object, **kwargs: object) -> object:
            return hook(*context, stock, *args, **kwargs)

        return call

    return replacement_of


def expect_package(package: str, works: str, names: Iterable[str]) -> None:
    """Check a framework's version and the private names it must have. Raises `VersionError`: what is missing.

    Args:
        works: versions that work, such as ``">=0.19.8,<0.20"``.
        names: ``"module:attribute"`` or ``"module:Class.attribute"``.
    """
    if not SpecifierSet(works).contains(version(package), prereleases=True):
        raise VersionError(f"{package} {version(package)} is not a version that works. Install {package}{works}.")
    missing = [name for name in names if not _exists(name)]
    if missing:
        raise VersionError(
            f"{package} {version(package)} does not have {', '.join(missing)}, which ds_hetero builds on. "
            f"Install {package}{works}."
        )


def _exists(name: str) -> bool:
    module, _, attributes = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            owner = getattr(owner, attribute)
    except (ImportError, AttributeError):
        return False
    return True
