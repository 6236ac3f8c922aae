"""The lab's emulator: ranks get what a cluster file says, and nothing is left behind however the program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.documents.routes import sent_by_interface
from benchmarks.emulation.awake import awake_cores
from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode, read_cluster
from benchmarks.emulation.emulator import emulate
from benchmarks.emulation.extension_locks import remove_abandoned_locks
from benchmarks.emulation.network import EmulationError
from benchmarks.emulation.throttle import CountedTime
from benchmarks.lab import launch
from benchmarks.lab.mesh import summarize as summarize_mesh
from benchmarks.lab.qlora import summarize as summarize_qlora
from benchmarks.lab.replan import summarize as summarize_replan
from benchmarks.lab.ring import STRATEGIES, summarize
from benchmarks.measure.contenders import Shape
from benchmarks.measure.results import FOLDER
from benchmarks.measure.statistics import within_bound
from ds_hetero.values.schedule import Group, Schedule
from tests.support import ROOT, run_deepspeed

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # emulated speeds take the time that they emulate

CLUSTER = """
nodes:
  - {speeds: [4, 3], bandwidth_gbit_per_s: 1, latency_us: 100}
  - {speeds: [1], bandwidth_gbit_per_s: 1, latency_us: 100, memory_mib: [100]}
"""
SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
ranks = torch.tensor([1.0])
dist.all_reduce(ranks)
try:
    torch.ones(200 * 2**18)
    memory = "enough"
except RuntimeError:
    memory = "too little"
folder = Path(sys.argv[1])
where = os.readlink("/proc/self/ns/net")
(folder / f"rank{dist.get_rank()}.tmp").write_text(f"{os.getpid()} {int(ranks)} {memory} {where}")
(folder / f"rank{dist.get_rank()}.tmp").rename(folder / f"rank{dist.get_rank()}")
time.sleep(float(sys.argv[2]))
dist.destroy_process_group()
"""


def test_speeds_of_a_cluster_file_become_shares_of_a_core():
    cluster = read_cluster({"nodes": [{"speeds": [4, 2], "memory_mib": [2, None]}, {"speeds": [1]}]})
    assert cluster.cores == pytest.approx((0.6, 0.3, 0.15))
    assert cluster.memory_bytes == (2 * 2**20, None, None)
    assert cluster.node_of_rank == (0, 0, 1)
    assert not cluster.has_links


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"nodes": [{"speeds": [1], "speed": 2}]}, "unknown keys"),
        ({"nodes": [{"speeds": [0]}]}, "positive"),
        ({"nodes": [{"speeds": [1], "bandwidth_gbit_per_s": 1}, {"speeds": [1]}]}, "all nodes"),
        ({"nodes": [{"speeds": [1, 2], "memory_mib": [1]}]}, "each of 2 ranks"),
    ],
)
def test_a_contradictory_cluster_file_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        read_cluster(content)


def test_counted_time_takes_as_long_as_the_emulated_device():
    x = torch.ones(256, 256)
    with CountedTime(0.25):
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        while time.thread_time() - cpu_s < 0.1:
            x @ x
        cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
    # It forgives 20 ms in which the thread had no core, and owes up to 1 ms at the end.
    assert wall_s > cpu_s / 0.25 - 0.021


def test_cores_are_kept_awake_by_idle_processes_that_end():
    with awake_cores() as pids:
        assert len(pids) in (0, len(os.sched_getaffinity(0)))
        for pid in pids:
            _wait_until(lambda pid=pid: os.sched_getscheduler(pid) == os.SCHED_IDLE, 30)
    assert not any(map(_alive, pids))


def test_every_rank_of_a_command_gets_its_node_and_speed(tmp_path):
    run = _launch(tmp_path, seconds=0)
    assert run.wait(timeout=90) == 0
    found = [(tmp_path / f"rank{rank}").read_text().split(maxsplit=2) for rank in range(3)]
    assert [ranks for _, ranks, _ in found] == ["3", "3", "3"]
    memory, where = zip(*(rest.rsplit(maxsplit=1) for *_, rest in found), strict=True)
    assert memory == ("enough", "enough", "too little")
    if where[0] != os.readlink("/proc/self/ns/net"):  # links could be emulated here
        assert where[0] == where[1] != where[2]


def test_ranks_of_a_node_with_two_links_send_over_one_each_and_past_both_inside_it():
    nodes = tuple(EmulatedNode(speeds=(1.0, 1.0), link_bit_per_s=1e9, links=2) for _ in range(2))
    try:
        with emulate(EmulatedCluster(nodes=nodes), network_methods=("relay",)) as emulated:
            sent = emulated.run(_send_to_the_peers)
    except EmulationError as error:
        pytest.skip(f"no network namespaces here: {error}")
    for of_rank in sent:
        assert all(count < 0.1 * _BYTES for count in of_rank["inside"].values()), of_rank
        assert all(_BYTES < count < 1.1 * _BYTES for count in of_rank["between"].values()), of_rank


_BYTES = 4 << 20


def _send_to_the_peers(lab):
    """Bytes by interface while every rank sends to the other one of its node, and to its counterpart of the other."""
    sent = {}
    for name, peer in (("inside", lab.rank ^ 1), ("between", lab.rank ^ 2)):
        out, into = torch.ones(_BYTES, dtype=torch.uint8), torch.zeros(_BYTES, dtype=torch.uint8)
        dist.barrier()
        before = sent_by_interface()
        dist.barrier()
        work = dist.isend(out, peer)
        dist.recv(into, peer)
        work.wait()
        dist.barrier()
        after = sent_by_interface()
        assert into.all()
        sent[name] = {device: after[device] - before[device] for device in after}
    return sent


def test_a_command_runs_once_per_node_and_knows_its_ranks(tmp_path):
    (tmp_path / "cluster.yaml").write_text("nodes: [{speeds: [4, 3]}, {speeds: [1]}]")
    note = ["sh", "-c", f'echo "rank=$RANK" > {tmp_path}/{{ranks}}']
    assert launch.main([str(tmp_path / "cluster.yaml"), "--", *note]) == 0
    assert [(tmp_path / count).read_text() for count in "21"] == ["rank=\n", "rank=\n"]


def test_only_locks_that_nobody_holds_are_removed(tmp_path):
    for name in ("held", "abandoned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with open(tmp_path / "held" / "lock"):
        assert remove_abandoned_locks(tmp_path) == [tmp_path / "abandoned" / "lock"]
    assert (tmp_path / "held" / "lock").exists() and not (tmp_path / "abandoned" / "lock").exists()


def test_the_report_has_every_result(tmp_path):
    from benchmarks.report import page

    written = page(FOLDER)
    assert all(path.name in written for path in FOLDER.glob("*.json"))
    assert "Four ranks in two unequal nodes" in written
    assert "<h2" not in page(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_or_network_outlives_the_launcher(tmp_path, number):
    run = _launch(tmp_path, seconds=600)
    _wait_until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(3)), 90)
    pids = [int((tmp_path / f"rank{rank}").read_text().split()[0]) for rank in range(3)]
    group = Path(f"/sys/fs/cgroup/cpu/ds_hetero_{run.pid}")
    helpers = [child for child in _children(run.pid) if child not in pids]
    run.send_signal(number)
    run.wait(timeout=30)
    _wait_until(lambda: not any(map(_alive, (*pids, *helpers))) and not group.exists(), 30)


def test_ring_results_become_rows():
    seconds = {name: [2.0, 2.2, 1.8] for name in STRATEGIES} | {"plan": [0.5], "one rank alone": [0.55]}
    equal = {name: [1.0] for name in STRATEGIES} | {"one rank alone": [1.9]}
    cases = [_ring_case(0.1, seconds), _ring_case(1.0, equal)]
    planned = next(row for row in summarize(cases) if row["strategy"] == "plan" and row["slow_fraction"] == 0.1)
    assert planned["speedup"] == pytest.approx(4.0)
    assert planned["slowdown"] == pytest.approx(0.5)
    assert planned["efficiency_against_bound"] == pytest.approx(1.0)  # 0.55 / 1.1 s


def test_a_figure_above_its_bound_is_shown_as_invalid():
    assert within_bound("2.32x", 0.95) == within_bound("2.32x", 1.0) == "2.32x"
    assert within_bound("2.59x", 1.04) == "invalid"


def test_mesh_results_become_rows():
    case = {
        "contenders": ("stock", "ring", "plan"),
        "scope": "attention",
        "tokens": 100,
        "speeds": (4.0, 3.0, 2.0, 1.0),
        "seconds": {"stock": [3.0, 3.0], "ring": [2.0, 2.0], "plan": [1.0, 1.0], "one rank alone": [2.0, 2.0]},
        "foreign_cores": 0.0,
    }
    rows = {row["contender"]: row for row in summarize_mesh([case])}
    assert rows["plan"]["over_best_uniform"] == 2.0
    assert rows["plan"]["efficiency_against_bound"] == pytest.approx(0.8)  # 2 s x 4 / 10
    assert rows["stock"]["tokens_per_s"] == pytest.approx(100 / 3)


def test_qlora_results_become_a_gain_over_the_fastest_balanced_job():
    measured = {
        "warm_s": {"balanced 1": 9.0, "balanced 2": 8.0, "balanced 4": 8.5, "planned": 4.0},
        "seconds": {"balanced 2": [8.0, 10.0, 9.0], "planned": [4.0, 4.0, 5.0]},
        "predicted_s": 4.4,
        "foreign_cores": 0.0,
    }
    summary = summarize_qlora(measured)
    assert summary["fastest_balanced"] == "balanced 2" and summary["balanced_s"] == 9.0
    assert summary["slower_s"] == {"balanced 4": 8.5, "balanced 1": 9.0}
    assert summary["gain"] == 2.0  # the median of 2, 2.5 and 1.8
    assert summary["prediction_error"] == pytest.approx(0.1)


def test_a_rank_without_tokens_takes_the_steps_of_the_others():
    run_deepspeed(_check_step_without_tokens, 2)


def _check_step_without_tokens(rank):
    import deepspeed

    from benchmarks.measure.training import make_scheduled_step

    deepspeed.init_distributed("gloo", verbose=False)
    shape = Shape(num_heads=2, num_kv_heads=2, head_dim=16, hidden_size=32)
    losses = []
    for tokens, heads in (((1, 1), (1, 1)), ((1, 0), (1, 1)), ((1, 0), (2, 0))):
        group = Group(ranks=(0, 1), tokens=tokens, heads=heads)
        step = make_scheduled_step(Schedule(num_heads=2, num_kv_heads=2, groups=(group,)), shape, 64)
        losses += [step(64), step(32)]
    assert losses[2:] == pytest.approx(losses[:2] * 2, rel=1e-5)  # sums in float32 in another order


def test_recovery_is_counted_from_the_slowdown():
    found = {
        "seconds": [1.0] * 3 + [4.0] * 6 + [2.0] * 10,
        "slowed_at": 3,
        "slow": {"optimum": [1.9, 2.0], "fixed": [4.0], "watched": [2.0]},
        "calm": {"watched": [1.01, 1.01], "fixed": [1.0, 1.0]},
        "calm_switches": 0,
        "switched_at": [6],
        "split": [3, 1],
    }
    rows, summary = summarize_replan(found, tokens=100)
    assert summary["recovered_after_steps"] == 6
    assert summary["gain_over_fixed"] == 2.0
    assert summary["undisturbed_cost"] == pytest.approx(0.01)
    assert [row["step"] for row in rows[:4]] == [-3, -2, -1, 0]
    assert rows[0]["of_optimum"] is None


def _ring_case(fraction, seconds):
    split = {name: [1, 1] for name in STRATEGIES}
    return {
        "slow_fraction": fraction,
        "tokens": 4096,
        "scope": "prefill",
        "split": split,
        "seconds": seconds,
        "foreign_cores": 0.0,
    }


def _launch(folder: Path, seconds: float) -> subprocess.Popen:
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "benchmarks.lab.launch", str(folder / "cluster.yaml"), "--no-verify", "--"]
    words += [sys.executable, str(folder / "script.py"), str(folder), str(seconds)]
    return subprocess.Popen(
        words, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=_listen_to_interrupts
    )


def _listen_to_interrupts() -> None:
    """A shell that runs the tests in the background has them, and all that they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(condition, timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.1)
