"""Fuzz files and options of the real command line, in one forked process per invocation."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.fuzz.kinds import KINDS, Nonsense, check_plan, expect
from benchmarks.fuzz.mutations import mutate, tear
from benchmarks.fuzz.trials import LONGEST_MESSAGE, Tally
from ds_hetero.cli import main
from ds_hetero.errors import HeteroError
from ds_hetero.values.plans import read_plan

CPU_LIMIT_S = 20
WALL_LIMIT_S = 120.0  # on a machine that does other things as well

_SCENARIO = ["--cluster", "cluster.yaml", "--model", "model.json", "--seq-len", "4096"]
_PIPELINES = ["--parallel", "full", "--global-batch", "4"]
COMMANDS: dict[str, list[str]] = {
    "plan": ["plan", *_SCENARIO, "--micro-batch", "1", "--zero-stage", "1", "--out", "out.json", "--json"],
    "plan, pipelines": ["plan", *_SCENARIO, *_PIPELINES, "--objective", "time", "--json"],
    "plan, lengths": ["plan", *_SCENARIO, "--lengths", "lengths.json", "--seed", "1", "--json"],
    "fit": ["fit", *_SCENARIO, "--what-if", "add=CPU", "--reduce-bucket-size", "1000", "--json"],
    "simulate": ["simulate", *_SCENARIO, "--schedule", "schedule.json", "--micro-batches", "2", "--json"],
    "simulate, pipelines": ["simulate", *_SCENARIO, "--plan", "plan.json", "--json"],
    "compare": ["compare", *_SCENARIO, "--cost-model", "calibrated", "--json"],
    "compare, exact": ["compare", *_SCENARIO, "--exact"],
    "show": ["show", "--out", "out.svg", *_SCENARIO, "--schedule", "schedule.json", "--json"],
    "show, documents": ["show", *_SCENARIO, "--schedule", "schedule.json", "--documents", "lengths.json", "--json"],
    "replan": ["replan", "--plan", "plan.json", *_SCENARIO, "--lost", "3", "--json"],
    "replicas": ["replicas", "--cluster", "cluster.yaml", *_SCENARIO, "--global-batch", "4", "--json"],
    "doctor": ["doctor", "--config", "config.json", "--world-size", "4", "--model", "model.json", "--json"],
    "profile": ["profile", "--out", "out.yaml", "--dtype", "float32", "--window-s", "0.001", "--json"],
}
"""Sound command lines on small inputs. `CommandLine` writes the files that they name."""

_KIND_OF_FILE = {
    "cluster.yaml": "cluster",
    "model.json": "model",
    "schedule.json": "schedule",
    "config.json": "section",
    "plan.json": "plan",
}
_VALUES = (
    "", "x", "0", "-1", "1", "3", "17", "1.5", "-0.5", "nan", "inf", "1e400", "1e-300", str(2**31), str(2**63 - 1),
    str(2**63), str(10**30), "9" * 5_000, "true", "null", "[]", "{}", "--json", "/", "/dev/null", "missing.json",
    "loop", ".", "é" * 300, "x" * 5_000, "\ud800", "cluster.yaml", "model.json", "schedule.json", "plan", "ulysses",
)  # fmt: skip
_FIELD_OF_KEY = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "mlp_size",
}
"""What schedules and plans call keys of a model's configuration."""
_TIMES = ("iteration_s", "step_s", "block_s", "tokens_per_s")
_server = multiprocessing.get_context("forkserver")


class CommandLine:
    """Invocations in a scratch folder with valid input files.

    Args:
        scratch: an empty folder.
    """

    def __init__(self, scratch: Path) -> None:
        _server.set_forkserver_preload(["benchmarks.fuzz.preload"])
        self._scratch, self._number = scratch, 0
        self._sound = {file: copy.deepcopy(KINDS[kind].example) for file, kind in _KIND_OF_FILE.items()}
        self._sound["lengths.json"] = [1000, 2000, 1096]
        self._sound["plan.json"] = self._plan_of_pipelines()

    def fuzz(self, name: str, count: int, rng: random.Random) -> Tally:
        """Invoke one command with ``count`` mutations, each of an input file or of its options."""
        tally = Tally()
        for _ in range(count):
            arguments, files = list(COMMANDS[name]), copy.deepcopy(self._sound)
            used = [argument for argument in arguments if argument in files]
            texts = {file: json.dumps(content) for file, content in files.items()}
            names: tuple[str, ...]
            if used and rng.random() < 0.6:
                texts, names = self._mutate_file(rng.choice(used), files, texts, rng)
            else:
                arguments, names = _mutate_options(arguments, rng)
            outcome, message = self._outcome(arguments, texts)
            tally.outcomes[outcome] += 1
            if outcome in ("traceback", "hang", "nonsense"):
                changed = {file: text[:300] for file, text in texts.items() if text != json.dumps(self._sound[file])}
                tally.faults.append(f"{message}\n  of {' '.join(arguments)[:300]} {changed}")
            if outcome == "clear error" and names:
                tally.count_named(message, names)
        return tally

    def is_sound(self, name: str) -> tuple[bool, str]:
        """Return whether a command works without a mutation, and its message."""
        outcome, message = self._outcome(COMMANDS[name], {f: json.dumps(c) for f, c in self._sound.items()})
        return outcome == "accepted", message

    def _mutate_file(
        self, file: str, files: dict[str, Any], texts: dict[str, str], rng: random.Random
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        content, names = mutate(files[file], rng, as_object=False)
        try:
            text = json.dumps(content)
        except RecursionError:
            text = "[" * 100_000
        if rng.random() < 0.15:
            text, names = tear(text, rng), ()
        return texts | {file: text}, (*names, *(_FIELD_OF_KEY[name] for name in names if name in _FIELD_OF_KEY))

    def _outcome(self, arguments: Sequence[str], texts: dict[str, str]) -> tuple[str, str]:
        """Invoke a command with these texts in its files; return outcome and message."""
        folder = self._scratch / str(self._number)
        self._number += 1
        folder.mkdir()
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8", errors="surrogatepass")
        (folder / "loop").symlink_to("loop")
        process = _server.Process(target=_invoke, args=(list(arguments), folder), daemon=True)
        process.start()
        process.join(WALL_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            return "hang", f"more than {WALL_LIMIT_S} s"
        if process.exitcode == -signal.SIGXCPU:
            return "hang", f"more than {CPU_LIMIT_S} s of CPU time"
        out, err = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return _judge(arguments, process.exitcode, out, err)

    def _plan_of_pipelines(self) -> dict[str, Any]:
        """Return the output of ``ds-hetero plan --parallel full`` for the valid files."""
        outcome, message = self._outcome(
            [*COMMANDS["plan, pipelines"], "--out", "made.json"], {f: json.dumps(c) for f, c in self._sound.items()}
        )
        assert outcome == "accepted", message
        outcome_of_command: dict[str, Any] = json.loads((self._scratch / "0" / "made.json").read_text())
        return outcome_of_command


def _mutate_options(arguments: list[str], rng: random.Random) -> tuple[list[str], tuple[str, ...]]:
    """Change, drop, repeat or misspell one option; return the names of which a message must have one."""
    options = [i for i, argument in enumerate(arguments) if argument.startswith("--")]
    i = rng.choice(options)
    option = arguments[i]
    has_value = i + 1 < len(arguments) and not arguments[i + 1].startswith("--")
    names = (option, option.removeprefix("--"), option.removeprefix("--").replace("-", "_"))
    how = rng.choice(("value", "value", "value", "drop", "rename", "repeat")) if has_value else "rename"
    if how == "value":
        value = rng.choice(_VALUES)
        return [*arguments[: i + 1], value, *arguments[i + 2 :]], (*names, *([value[:20]] if len(value) > 1 else []))
    if how == "drop":
        return [*arguments[:i], *arguments[i + 2 :]], names
    if how == "repeat":
        return [*arguments, option, rng.choice(_VALUES)], ()
    wrong = rng.choice((option + "s", option[:-1], option.upper()))
    return [*arguments[:i], wrong, *arguments[i + 1 :]], (*names, wrong)


def _judge(arguments: Sequence[str], code: int | None, out: str, err: str) -> tuple[str, str]:
    """Return the outcome of an invocation, and its message."""
    if "Traceback (most recent call last)" in err or code not in (0, 1, 2):
        return "traceback", f"exit code {code}: {(err.strip().splitlines() or ['nothing'])[-1][:300]}"
    if code == 0 or (code == 1 and arguments[0] == "fit"):  # fit ends with 1 where nothing is wrong but memory
        try:
            _check_report(out if "--json" in arguments else None)
        except (Nonsense, HeteroError, ValueError) as error:
            return "nonsense", f"nonsense: {type(error).__name__}: {str(error)[:300]}"
        return "accepted", ""
    message = err
    if code == 1:  # of doctor alone, which reports what is wrong
        report = json.loads(out) if out.startswith("{") else {"section": {"problem": out}}
        message = str((report["section"] or {}).get("problem") or "")
    if not message.strip():
        return "traceback", f"exit code {code} without a message"
    return ("clear error", message) if len(message) < LONGEST_MESSAGE else ("traceback", "a message without end")


def _check_report(text: str | None) -> None:
    """Check the invariants of a command's output."""
    if text is None:
        return

    def refuse(constant: str) -> NoReturn:
        raise Nonsense(f"{constant} is printed")

    report = json.loads(text, parse_constant=refuse)

    def check(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in _TIMES and isinstance(inner, (int, float)):
                    expect(isfinite(inner) and inner > 0, f"{key} is positive")
                if key == "schedule" and isinstance(inner, dict):
                    check_plan(read_plan(inner))
                if key == "plan" and isinstance(inner, dict) and "version" in inner:
                    expect(read_plan(read_plan(inner).to_dict()) == read_plan(inner), "a plan survives its file")
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(report)


def _invoke(arguments: list[str], folder: Path) -> None:
    """Run the command line in this process and exit with its exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 5))
    os.chdir(folder)
    with open("stdout", "w") as out, open("stderr", "w") as err, redirect_stdout(out), redirect_stderr(err):
        code = _exit_code(lambda: main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _exit_code(run: Callable[[], int]) -> int:
    try:
        return run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 70
