"""AMP (NeurIPS 2022), the planner for unlike devices that Sailor's repository has beside FlashFlex, Metis and its own.

It is run from Sailor's checkout (MIT) and needs numpy and torch. Its model of a cluster is nodes of one size and one
rate between them, so nodes of ours are cut into nodes of their greatest common size. It gives every device the mean
time of all kinds, and looks at no memory: what does not fit is left to our cost model. It counts 4 bytes an element, so
it is told twice the rate.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

from benchmarks.peers.judge import MAX_PLANS, Case, NoPlan
from benchmarks.peers.process import printed_by
from benchmarks.peers.sailor import DEGREES, EDGE_S, HALF, ZONE, on_nodes, sizes_of_layers
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.values.plans import Plan

ITS_ELEMENT_BYTES = 4
ITS_BACKWARD = 3  # forwards that a forward and a backward are


def plans(checkout: Path, python: str, case: Case, timeout_s: float) -> Iterator[Plan]:
    """Yield AMP's plans, best first by its own time.

    Raises:
        NoPlan: it does not end, or has no plan.
    """
    costs = CalibratedStageCosts(case.cluster, case.model, Workload(seq_len=case.seq_len))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, case, costs)
        driver = Path(__file__).with_name("amp_driver.py")
        search = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
        printed_by([python, str(driver), str(folder)], folder, timeout_s, {"SAILOR_PATH": name, "PYTHONPATH": search})
        its_plans = json.loads((folder / "plans.json").read_text())
    if not its_plans:
        raise NoPlan("it finds no plan")
    kinds = {index: index for index in range(len(costs.pools.kinds))}
    for plan in its_plans:
        with contextlib.suppress(NoPlan):
            yield on_nodes(case, costs, kinds, plan)


def _write(folder: Path, case: Case, costs: CalibratedStageCosts) -> None:
    """Write all files that it reads, at the places of Sailor's checkout."""
    model, pools = case.model, costs.pools.pools
    size = gcd(*(len(pool.ranks) for pool in pools))
    names = [f"kind{kind}" for kind in range(len(costs.pools.kinds))]
    rate = case.cluster.network.bytes_per_s * ITS_ELEMENT_BYTES / HALF
    package = folder / "sailor" / "sailor"
    (package / "providers").mkdir(parents=True)
    (package / "Planner").mkdir()
    network = {name: {str(size): {ZONE: {name: {str(size): [[0.0, 0.0, 0.0], rate]}}}} for name in names}
    (package / "providers" / "multizone_bandwidths_het.json").write_text(json.dumps({ZONE: network}))
    (package / "Planner" / "llm_info.json").write_text(
        json.dumps({model.name: {str(degree): sizes_of_layers(costs, degree) for degree in DEGREES}})
    )
    counts = dict.fromkeys(names, 0)
    for pool in pools:
        counts[names[pool.kind]] += len(pool.ranks) // size
    training = {
        "model": model.name,
        "type": "gpt2",
        "global_batch_size": case.batch,
        "hidden_size": model.hidden_size,
        "sequence_length": case.seq_len,
        "num_layers": model.num_layers,
        "num_all_layers": model.num_layers + 2,
        "vocab_size": model.vocab_size,
    }
    question = {
        "zone": ZONE,
        "training": training,
        "nodes": {name: {"num_nodes": number, "gpus_per_node": size} for name, number in counts.items()},
        "forwards_s": {name: _forwards_s(costs, kind, size) for kind, name in enumerate(names)},
        "most": MAX_PLANS,
    }
    (folder / "question.json").write_text(json.dumps(question))


def _forwards_s(costs: CalibratedStageCosts, kind: int, most: int) -> dict[str, list[Any]]:
    """Return a third of the time of every layer for one sample, by tensor degree; embedding first, head last."""
    forwards = {}
    for degree in (degree for degree in DEGREES if degree <= most):
        option = costs.stage(kind, degree, "one" if degree == 1 else "tensor", 1, 1)
        if option is not None:
            layers = [EDGE_S, *[option.layer_s] * costs.model.num_layers, option.last_s]
            forwards[str(degree)] = [seconds / ITS_BACKWARD for seconds in layers]
    return forwards
