"""Which decoders that train are planned, for docs/architectures.md.

    python -m tests.support_matrix    # writes the list
    python -m tests.families          # prints the error of every size

`tests/unit/models/test_sizes.py` holds sizes and refusals to this list.
"""

from __future__ import annotations

from collections import defaultdict

from ds_hetero.models.families import UNPLANNED_TOWERS, UNPLANNED_TYPES
from tests.sweep_table import folded, listed, recorded

_UNFOLDED = 10  # types that the list shows without a click


def render_planned() -> str:
    """Return the list of types by what the planner does with them."""
    exact = [name.removeprefix("causal ") for name, (kind, _) in recorded().items() if kind == "exact"]
    refused = UNPLANNED_TYPES | {
        name: f"{part} beside its decoder has no cost model" for name, part in UNPLANNED_TOWERS.items()
    }
    types_by_answer: dict[str, list[str]] = defaultdict(list)
    for name in exact:
        if " " not in name:
            types_by_answer[refused.get(name, "")].append(name)
    lines = []
    for reason, types in sorted(types_by_answer.items()):
        answer = f"refused: {reason}" if reason else "planned"
        names = folded("types", listed(types)) if len(types) > _UNFOLDED else listed(types)
        lines.append(f"* **{answer}** ({len(types)}): {names}")
    return "\n".join(lines)
