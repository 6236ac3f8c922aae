"""``ds-hetero profile``: measure the live ranks and write what they are as a cluster file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from ds_hetero.errors import ClusterError
from ds_hetero.integrations.profiling import profile

__all__ = ["run"]


def run(out: Path, as_json: bool) -> None:
    """Measure on every rank; rank 0 writes and prints."""
    if out.suffix not in (".json", ".yaml", ".yml"):
        raise ClusterError(f"--out must end in .yaml or .json, got {out}.")
    content = profile(show_progress=not as_json)
    if int(os.environ.get("RANK", "0")):
        return
    text = json.dumps(content, indent=1) if out.suffix == ".json" else yaml.safe_dump(content, sort_keys=False)
    out.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps(content))
        return
    errors = content["profile"]["fit_errors"]
    print(f"{len(content['profile']['ranks'])} ranks on {len(content['nodes'])} nodes measured; written to {out}")
    for term, error in errors.items():
        median, largest = 100 * error["median"], 100 * error["largest"]
        print(f"  {term}: the fit is off by {median:.1f} % in the median, {largest:.0f} % at most")
