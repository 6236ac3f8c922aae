"""The search of pipelines in a terminal: a line that follows it, and Ctrl-C, which takes the best plan so far."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

CLUSTER = {
    "nodes": [
        {"name": f"n{i}", "device": device, "count": 8}
        for i, device in enumerate(["RTX-3090"] * 2 + ["RTX-4090"] * 5 + ["A800-SXM-80GB"])
    ],
    "network": {"bandwidth_gb_per_s": 0.75, "latency_us": 10},
}


def in_terminal(arguments, cwd, until, timeout_s=100):
    """Run the command on a pseudo-terminal, press Ctrl-C once ``until`` is on it; what it showed, and its exit code.

    The terminal's driver turns the key into SIGINT for the foreground process group, as for a person.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a shell runs in the background, as CI does
        os.execv(sys.executable, [sys.executable, "-m", "ds_hetero.cli", *arguments])
    shown, pressed, stop = "", False, time.monotonic() + timeout_s
    try:
        while time.monotonic() < stop:
            ready, _, _ = select.select([terminal], [], [], 0.2)
            if ready:
                try:
                    data = os.read(terminal, 65536)
                except OSError:
                    break
                if not data:
                    break
                shown += data.decode(errors="replace")
            if not pressed and until in shown:
                os.write(terminal, b"\x03")
                pressed = True
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return shown, os.waitstatus_to_exitcode(status)


@pytest.fixture
def options(tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    return ["plan", "--cluster", "cluster.json", "--model", "llama-30b", "--seq-len", "4096", "--parallel", "full"]


def test_ctrl_c_in_a_terminal_takes_the_best_plan_so_far(tmp_path, options):
    shown, code = in_terminal([*options, "--global-batch", "512", "--out", "plan.json"], tmp_path, "Ctrl-C takes it")
    assert code == 0, shown
    assert "interrupted" in shown
    assert "written to plan.json" in shown
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 2


@pytest.mark.slow
def test_an_interrupt_reaches_a_search_that_nobody_watches(tmp_path, options):
    command = [sys.executable, "-m", "ds_hetero.cli", *options, "--global-batch", "512", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.3)
            if _cpu_s(running.pid) > 1.5:  # past the imports, within the search
                running.send_signal(signal.SIGINT)
                break
        out, err = running.communicate(timeout=300)
    assert running.returncode in (0, 130), err
    if running.returncode == 0:
        assert json.loads(out)["plan"]["version"] == 2
    assert "Traceback" not in err


def _cpu_s(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
