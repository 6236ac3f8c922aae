"""The command line: what machines read, and what bad input gets."""

import json
import subprocess
import sys

from ds_hetero.paths import config_dir


def _run(*arguments):
    command = [sys.executable, "-m", "ds_hetero.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_doctor_tells_machines_what_works_here():
    sizes = ["--world-size", 4, "--num-heads", 10, "--num-kv-heads", 5]
    run = _run("doctor", "--config", config_dir() / "zero2.json", *sizes, "--json")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["healthy"]
    assert {"torch", "deepspeed", "transformers", "accelerate"} <= {row["name"] for row in report["packages"]}
    assert report["devices"][0]["kernels"]["float32"]["torch"] is None
    (schedule,) = report["section"]["schedules"]
    assert schedule["num_heads"] == 10


def test_doctor_names_what_is_wrong_with_a_section(tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"heterogeneity": {"schedul": "ring"}}))
    run = _run("doctor", "--config", config)
    assert run.returncode == 1
    assert 'did you mean "schedule"?' in " ".join(run.stdout.split())


def test_an_unknown_command_exits_with_2():
    assert _run("docter").returncode == 2
