"""A job of three emulated nodes whose parts are killed for real; every step is compared with one process."""

import random
import subprocess
import sys

import pytest

from benchmarks.elastic.__main__ import Job, cluster_of, summarize
from benchmarks.elastic.faults import KINDS, PHASES, FaultRun
from benchmarks.elastic.nodes import Cluster, warm_server

pytestmark = [pytest.mark.slow, pytest.mark.alone]

EVERY = 2


@pytest.fixture(scope="module")
def warm_socket(tmp_path_factory):
    with warm_server(tmp_path_factory.mktemp("warm")) as path:
        yield path


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL sets it
@pytest.mark.parametrize(
    ("job", "num_faults"),
    [
        (Job(1, [1, 1, 1]), 6),
        (Job(3, [2, 2]), 5),
        (Job(2, [1, 1], loop="trainer"), 5),
        (Job(1, [1, 1, 1], loop="pipelines"), 3),
        (Job(3, [1, 1], loop="accelerate"), 3),
        (Job(1, [1, 1], loop="sft"), 3),
        (Job(1, [1, 1, 1], loop="trainer_of_pipelines"), 3),
    ],
    ids=lambda given: f"{given.loop}-zero{given.stage}" if isinstance(given, Job) else "",
)
def test_a_job_goes_on_exactly_after_every_fault(tmp_path, warm_socket, job, num_faults):
    with cluster_of(job, tmp_path, EVERY, warm_socket) as cluster:
        lines = list(FaultRun(cluster, random.Random(job.stage), EVERY, limit_s=90).run(num_faults, KINDS, PHASES))
        assert not any(line["hang"] for line in lines), (lines[-1], _logs(cluster))
    assert len(lines) == num_faults
    for line in lines:
        assert line["lost_steps"] <= 2 * EVERY - 1, line
        assert line["steps_missing"] == 0 and line["steps"], line
        # float32, whose rounding differs with the number of ranks
        assert line["loss_difference"] < 1e-6 and line["parameter_difference"] < 1e-7, line
    assert summarize(lines, EVERY)["lost_with_notice"] == 0


def _logs(cluster):
    return {path.name: path.read_text()[-1500:] for path in cluster.folder.glob("*.log")}


WITHOUT_SECTION = """
deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1})
"""
# Nobody would keep the scheduler: after a fault it would begin anew, without a word.
LOST_SCHEDULER = """
from benchmarks.elastic.small_model import make_loader, make_model, make_scheduler
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = make_scheduler(optimizer)
config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**config, "heterogeneity": {}})
handle.elastic(handle.dataloader(make_loader()))
"""
# Nobody would move the experts of a lost rank.
DIVIDED_EXPERTS = """
from tests.integration.loops.test_experts import mixture
model = mixture()
config = {"train_batch_size": 1, "heterogeneity": {"experts": "equal"}}
deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
"""


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (DIVIDED_EXPERTS, "elastic jobs do not move experts between ranks yet", "or leave the key out."),
        (WITHOUT_SECTION, 'an engine without a "heterogeneity" section cannot be kept', "Start it without --elastic."),
        (
            LOST_SCHEDULER,
            "the optimizer has a learning-rate scheduler that an elastic job would lose",
            'handle.elastic(loader, extra={"scheduler": scheduler}).',
        ),
    ],
    ids=["divided experts", "no section", "a scheduler that nobody keeps"],
)
def test_a_refusal_ends_the_job_once_with_its_reason(tmp_path, warm_socket, code, reason, remedy):
    script = tmp_path / "train.py"
    script.write_text(
        "import deepspeed, torch, ds_hetero\n"
        'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
        "handle = ds_hetero.register()\n" + code
    )
    cluster = Cluster(tmp_path, [1], [], warm_socket)
    options = ["--elastic", "--job", cluster.job, "--node", "n0", "--ranks", "1", "--warm", str(warm_socket)]
    job = subprocess.run(
        [sys.executable, "-m", "ds_hetero.run", *options, str(script)],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    cluster.end()
    assert job.returncode == 2, job.stderr
    assert job.stderr.rstrip().splitlines()[-1].endswith(remedy), job.stderr
    assert reason in job.stderr
