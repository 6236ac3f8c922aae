"""Parts of the examples that the long run shares: the documents of examples/pretrain, and emulated speeds."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.measure.results import FOLDER

_EXAMPLES = FOLDER.parents[1] / "examples"


def documents(vocabulary: int) -> Any:
    """Return functions and classes of Python's standard library as tokens, ``training`` and ``held_out``."""
    _let_import(_EXAMPLES / "pretrain")
    import definitions

    return definitions.documents(vocab_size=vocabulary)


def emulated_speed(cores: float) -> Any:
    """Return an `EmulatedSpeed` of a share of a core."""
    _let_import(_EXAMPLES)
    from emulated_speed import EmulatedSpeed

    return EmulatedSpeed(cores)


def _let_import(folder: Any) -> None:
    """Let scripts of a folder be imported by their bare names, as they import each other."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
