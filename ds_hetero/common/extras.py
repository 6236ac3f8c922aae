"""What the optional parts of ds_hetero need: planning takes the base installation, training the extra ``train``."""

from __future__ import annotations

from importlib.util import find_spec

from ds_hetero.errors import DependencyError

__all__ = ["TRAINING", "require"]

TRAINING = ("torch", "deepspeed", "transformers", "accelerate")


def require(*packages: str, purpose: str) -> None:
    """Raise if one of ``packages`` is not installed; none of them is imported.

    Args:
        packages: names to import.
        purpose: what needs them, as the subject of a sentence.

    Raises:
        DependencyError: which ones are missing, and the command that installs them.
    """
    missing = [name for name in packages if not _installed(name)]
    if missing:
        raise DependencyError(
            f"{purpose} needs {', '.join(packages)}; not installed: {', '.join(missing)}. "
            'Install them: pip install "ds-hetero[train]".'
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that refuses it, or a module without a spec in its place
        return False
