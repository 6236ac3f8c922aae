"""Where the commands leave what they have found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "write"]

FOLDER = Path(__file__).resolve().parents[1] / "results"


def write(outcome: dict[str, Any], path: Path) -> None:
    """As JSON, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(outcome, indent=1) + "\n")
