"""Call Sailor's planner in an interpreter with its library: ``python sailor_driver.py LIBRARY_FOLDER FOLDER``.

FOLDER has ``question.json`` with the arguments of its planner, and gets ``plans.json``, best first by Sailor's own
time. It imports nothing of this project, which the interpreter may not have.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main(library: str, folder: Path) -> None:
    """Read the question, call the planner, write its plans."""
    sys.path.insert(0, library)
    planner = importlib.import_module("libplanner")
    question = json.loads((folder / "question.json").read_text())
    its_plans = planner.SailorPlanner(
        *question["files"], True, True, question["quotas"], "throughput"
    ).get_sorted_plans(question["devices"], 0.0, 0.0)
    plans = [
        {
            "step_s": plan.get_Tpp(),
            "micro_batch_size": plan.get_mbs(),
            "layers": [len(stage) for stage in plan.get_stages()],
            "groups": [[list(group)[:2] for group in stage] for stage in plan.get_config_per_stage()],
        }
        for plan in its_plans[: question["most"]]
    ]
    (folder / "plans.json").write_text(json.dumps(plans))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
