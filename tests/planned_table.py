"""Which decoders that train are planned, for docs/architectures.md.

    python -m tests.support_matrix    # writes the list
    python -m tests.families          # prints the error of every size

`tests/unit/models/test_sizes.py` holds sizes and refusals to this list.
"""

from __future__ import annotations

from collections import defaultdict

from ds_hetero.models.families import UNPLANNED_TOWERS, UNPLANNED_TYPES
from tests.sweep_table import listed, recorded


def render_planned() -> str:
    """Return how many types are planned, and the list of the others by reason."""
    exact = [name.removeprefix("causal ") for name, (kind, _) in recorded().items() if kind == "exact"]
    refused = UNPLANNED_TYPES | {
        name: f"{part} beside its decoder has no cost model" for name, part in UNPLANNED_TOWERS.items()
    }
    types_by_answer: dict[str, list[str]] = defaultdict(list)
    for name in exact:
        if " " not in name:
            types_by_answer[refused.get(name, "")].append(name)
    num_planned = len(types_by_answer.pop(""))
    num_refused = sum(map(len, types_by_answer.values()))
    lines = [f'* **planned** ({num_planned}): all decoders that train ("exact" above), but these {num_refused}']
    for reason, types in sorted(types_by_answer.items()):
        lines.append(f"* **refused: {reason}** ({len(types)}): {listed(types)}")
    return "\n".join(lines)
