"""Tables of docs/architectures.md on the sweep over transformers' architectures, from its recorded outcomes.

    python -m tests.integration.sweep        # runs the sweep on two ranks, and records the outcomes
    python -m tests.support_matrix           # writes the tables into docs/architectures.md

`tests/integration/models/test_sweep.py` compares every run with the record.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from tests.support import ROOT

RECORD = ROOT / "tests" / "integration" / "sweep_outcomes.json"

_HEADS = {
    "causal": "decoders",
    "masked": "masked language models",
    "images": "images or audio, with text",
    "tokens": "token classification",
    "seq2seq": "encoder-decoders, and audio with text",
}
_KINDS = ("exact", "refused", "not built")


def recorded() -> dict[str, tuple[str, str]]:
    """Return by head and model type the outcome and its reason."""
    return {name: (kind, why) for name, (kind, why) in json.loads(RECORD.read_text()).items()}


def render_sweep(found: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Return the tables of counts, and of model types by outcome."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, (kind, why) in (recorded() if found is None else found).items():
        head, _, model_type = name.partition(" ")
        groups[kind, head, _reason(kind, why)].append(model_type)
    counts = Counter((head, kind) for (kind, head, _), types in groups.items() for _ in types)
    lines = ["| head | exact | refused by name | not built |", "|---|---|---|---|"]
    for head, words in _HEADS.items():
        lines.append(f"| {words} | {' | '.join(str(counts[head, kind]) for kind in _KINDS)} |")
    totals = [sum(count for (_, of_kind), count in counts.items() if of_kind == kind) for kind in _KINDS]
    lines.append(f"| all | {' | '.join(map(str, totals))} |")
    for head, words in _HEADS.items():
        rows: list[str] = []
        for kind in _KINDS:
            of_head = [(reason, types) for (k, h, reason), types in groups.items() if (k, h) == (kind, head)]
            for reason, types in sorted(of_head, key=lambda entry: -len(entry[1])):
                rows.append(f"* **{f'{kind}: {reason}' if reason else kind}**: {listed(types)}")
        lines += ["", folded(f"Types: {words}", "\n".join(["", "", *rows, "", ""]))]
    return "\n".join(lines)


def folded(summary: str, content: str) -> str:
    """Return a part of a page that readers open by a click."""
    return f'<details markdown="1"><summary>{summary}</summary>{content}</details>'


def listed(types: Iterable[str]) -> str:
    """Return model types, joined by commas."""
    return ", ".join(f"`{name}`" for name in sorted(types))


def _reason(kind: str, why: str) -> str:
    """Return the first reason of a refusal without class names, so that types with the same reason share a row."""
    if kind != "refused":
        return why if kind == "exact" else ""
    if "computes something else when it is split" in why:
        return "by the self-check, at the first batch"
    first = why.partition(" cannot be split over the sequence: - ")[2] or re.sub(r"^\w+ ", "", why)
    first = re.split(r" - |;|, where|\. ", first)[0].rstrip(".")
    first = re.sub(r"^layers of type .*", "layers of types that are not supported", first)
    first = re.sub(r"^layer \S+ \(\w+\)", "a layer", first)
    first = re.sub(r"^\S+ \(\w+\) chooses", "an indexer chooses", first)
    return re.sub(r"\b[A-Z]\w+(Model|Decoder|Wrapper)(\.forward)?\b", "the model", first).replace("|", "/")
