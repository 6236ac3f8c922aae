"""No pipelines in 16 bits are planned on cards without bf16: they refuse fp16, and bf16 is refused there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_hetero.cli import main
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cost import Workload
from ds_hetero.errors import PlanError
from ds_hetero.planner.pipelines.native_types import expect_trainable
from ds_hetero.values.plans import Plan, read_plan

SAID = r"these devices have no bf16: T4, ranks 0, 1\. Leave them out of the cluster; or plan one replica"
STAGES = {"version": 2, "model": {"num_layers": 16, "num_heads": 32, "num_kv_heads": 8}}


def _devices(gpus: str) -> Any:
    return cluster_from_dict(read_notation(gpus).content).devices


def _plan(ranks: list[int]) -> Plan:
    stages = [{"ranks": [rank], "layers": [8 * i, 8 * i + 8]} for i, rank in enumerate(ranks)]
    pipeline = {"micro_batch_size": 1, "micro_batches": 4, "stages": stages}
    return read_plan({**STAGES, "pipelines": [pipeline]}, None)


def test_cards_without_bf16_are_refused_by_ranks_and_names_in_16_bits_alone() -> None:
    with pytest.raises(PlanError, match=SAID):
        expect_trainable(_devices("T4x2,4090x2"), Workload(seq_len=1024))
    expect_trainable(_devices("T4x2,4090x2"), Workload(seq_len=1024, element_bytes=4))
    expect_trainable(_devices("3090x2,4090x2"), Workload(seq_len=1024))


def test_a_given_plan_is_refused_for_the_cards_that_it_uses() -> None:
    with pytest.raises(PlanError, match=r"no bf16: T4, rank 1\."):
        expect_trainable(_devices("T4x2,4090x2"), Workload(seq_len=1024), _plan([1, 2]))
    expect_trainable(_devices("T4x2,4090x2"), Workload(seq_len=1024), _plan([2, 3]))


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--parallel", "full"],
        ["plan", "--parallel", "full", "--objective", "pareto", "--price", "T4=0.2,4090=0.4"],
        ["compare", "--parallel", "full"],
        ["simulate"],
    ],
)
def test_commands_say_so_with_what_to_change(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--gpus", "T4x2,4090x2", "--model", "llama-3.2-1b", "--seq-len", "4096"]
    if arguments == ["simulate"]:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(_plan([0, 1]).to_dict()))
        arguments = [*arguments, "--plan", str(file)]
    else:
        arguments = [*arguments, "--global-batch", "4"]
    assert main([*arguments, *job]) == 2
    assert re.search(SAID, " ".join(capsys.readouterr().err.split()))
