"""``"parallel": "best"``: the job chooses its kind when it starts, on all ranks alike, and trains as one process.

Budget: 60 s.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch

from tests.integration.pipelines.test_pipeline_start import cluster
from tests.integration.pipelines.test_pipelines import adamw, batches, made_model, train_alone, trained
from tests.integration.tiny import compute_in
from tests.support import run_deepspeed

SAMPLES = 8
STEPS = {"pipelines": [{"micro_batch_size": 1, "micro_batches": SAMPLES}]}


def section(bandwidth_gb_per_s: float, **changes: Any) -> dict[str, Any]:
    """Two unequal devices; over a slow network pipelines are faster, over a fast one one sequence is shared."""
    described = cluster(2, 1, memory_gib=16.0)  # DeepSpeed's buckets take 4 of them
    link = {"bandwidth_gb_per_s": bandwidth_gb_per_s, "latency_us": 1}
    described["network"] = link
    return {"parallel": "best", "cluster": described, "seq_len": 64, **changes}


def trains(rank: int, jobs: list[dict[str, Any]]) -> list[tuple[float, bool, int, str]]:
    """Of every job: difference from one process, whether it has pipelines, the plan, and what was said."""
    import deepspeed

    import ds_hetero

    compute_in(torch.float64)
    handle = ds_hetero.register()
    results = []
    for more in jobs:
        model, whole = (made_model({}, False) for _ in range(2))
        said = io.StringIO()
        config = {"train_batch_size": SAMPLES, "gradient_clipping": 0.5, **more}
        with contextlib.redirect_stderr(said):
            engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
        of_engine = handle.for_engine(engine)
        steps = batches(STEPS, 2, False)
        losses, _ = train_alone(whole, steps, adamw(trained(whole)), 0.5)
        worst = 0.0
        for batch, loss in zip(of_engine.dataloader(steps), losses, strict=True):
            ours = engine(**batch).loss
            engine.backward(ours)
            engine.step()
            worst = max(worst, abs(ours.item() - loss))
        results.append((worst, not of_engine.plan.is_replicas, of_engine.plan.fingerprint, said.getvalue()))
        engine.destroy()
    return results


@pytest.mark.timeout(300)
def test_a_job_takes_the_faster_kind_and_the_same_loop_trains_as_one_process() -> None:
    zero = {"zero_optimization": {"stage": 1}}
    jobs = [
        {**zero, "heterogeneity": section(0.001)},
        {**zero, "heterogeneity": section(0.001), "sequence_parallel_size": 2, "gradient_accumulation_steps": 1},
        {"zero_optimization": {"stage": 3}, "heterogeneity": section(0.001)},
    ]
    first, *others = run_deepspeed(trains, 2, jobs)
    for other in others:
        assert [job[1:3] for job in other] == [job[1:3] for job in first]
    for of_rank in (first, *others):
        in_pipelines, in_pipelines_too, in_sequences = (job[0] for job in of_rank)
        assert max(in_pipelines, in_pipelines_too) < 1e-12
        assert in_sequences < 1e-8  # DeepSpeed's ZeRO-3 steps values in fp32, whatever the parameters are in
    slow, sized, stage_3 = first
    assert slow[1] and sized[1]
    assert '"parallel": "best" is pipelines (sequence parallelism: ' in slow[3]
    assert not stage_3[1] and "pipelines: no, " in stage_3[3] and "zero_optimization" in stage_3[3]
