"""Call AMP in an interpreter with its packages: ``SAILOR_PATH=FOLDER PYTHONPATH=CHECKOUT python amp_driver.py FOLDER``.

FOLDER has ``question.json`` with nodes, profiles and the training task, and gets ``plans.json``, best first by AMP's
own time. It imports nothing of this project, which the interpreter may not have.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Read the question, call the planner, write its plans."""
    sys.path.remove(str(Path(__file__).resolve().parent))  # a module there has the checkout's name
    numpy = importlib.import_module("numpy")
    prices = importlib.import_module("sailor.Planner.simulations.constants").GPU_PRICES
    planner = importlib.import_module("sailor.Planner.baselines.AMP.amp_planner").AMPPlanner
    question = json.loads((folder / "question.json").read_text())
    for name, forwards in question["forwards_s"].items():
        prices[name] = {question["zone"]: 1.0}  # it prices every plan, whatever it is asked for
        (folder / "profiles" / name).mkdir(parents=True)
        for degree, seconds in forwards.items():
            numpy.save(folder / "profiles" / name / f"profile_{degree}.npy", numpy.array(seconds))
    nodes = {**question["nodes"], "zone": question["zone"]}
    its_plans = planner(str(folder / "profiles")).get_sorted_plans(nodes, question["training"])
    index_of = {name: index for index, name in enumerate(question["nodes"])}
    timed = [plan for plan in its_plans if math.isfinite(plan["iteration_time"])]
    plans = []
    for plan in sorted(timed, key=lambda plan: float(plan["iteration_time"]))[: question["most"]]:
        (lanes,) = plan["pipeline_list"]
        groups = [[[index_of[devices[0][0]], degree] for devices, degree in stage] for stage in lanes["tmp_per_stage"]]
        layers = [len(stage) for stage in lanes["layers_per_stage"]]
        plans.append({"micro_batch_size": plan["mbs"], "layers": layers, "groups": groups})
    (folder / "plans.json").write_text(json.dumps(plans))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
