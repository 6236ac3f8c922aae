"""What commands print fits a terminal of 80 columns: no line is longer, no word is cut, nothing is left out."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path
from typing import TextIO

import click
import pytest

from ds_hetero.cli import main
from ds_hetero.cli.app import COMMANDS, app
from ds_hetero.cli.printing import print_lines
from ds_hetero.cli.showing.elastic import _lines as status_lines
from ds_hetero.common.tables import framed_table
from ds_hetero.common.terminal import coloured, fitted_text, terminal_width

COLUMNS = 80
SMALL = "--gpus 5090,3090x2 --model qwen3-0.6b --seq-len 8K"
ISLANDS = "--cluster cloud-l40s-a10g --model llama-3.1-8b --seq-len 8192"
UNEQUAL = "--cluster hexiseq-setting-1 --model llama-3.1-8b --seq-len 65536"
# Each command as it is typed. `{folder}` holds the plans that commands before it have written.
TYPED = {
    "plan of pipelines": f"plan {ISLANDS} --parallel full --global-batch 16 --out plan.json",
    "plan of a job": f"plan {SMALL}",
    "plan of a schedule": f"plan {SMALL} --parallel sequence --zero-stage 3 --out schedule.json",
    "plan": f"plan {SMALL}",
    "plan, all details": f"plan {SMALL} --explain",
    "fit, fits": f"fit {SMALL} --what-if add=3090 --elastic 0",
    "fit, does not fit": f"fit {UNEQUAL} --seq-len 512K --what-if network=1",
    "replicas": f"replicas {UNEQUAL} --cluster hexiseq-setting-2 --global-batch 16",
    "replan": f"replan --plan plan.json {ISLANDS} --lost 7",
    "simulate": f"simulate {UNEQUAL} --schedule proportional",
    "simulate pipelines": f"simulate {ISLANDS} --plan plan.json",
    "compare": f"compare {UNEQUAL}",
    "compare pipelines": f"compare {ISLANDS} --parallel full --global-batch 16",
    "cards": "cards",
    "cards by name": "cards h100 4090 foo",
    "show": f"show {SMALL} --schedule schedule.json --out picture.svg",
    "show documents": f"show {UNEQUAL} --sample github",
    "report": "report schedule.json --out report.html --no-sliders",
    "launch-files": "launch-files schedule.json --out launch",
    "trace": "trace schedule.json --out trace.json",
    "doctor": "doctor",
    "doctor of a section": "doctor --config section.json --world-size 8 --model llama-3.1-8b --checkpointing",
    "unknown card": f"fit {SMALL.replace('5090', 'foo')}",
    "unknown model": f"fit {SMALL}x",
    "wrong option": f"plan {SMALL} --layout diagonal",
}
WRITES_FILES = ("plan of pipelines", "plan of a schedule")  # that the others read
# They measure live ranks, read what jobs have left, or write for machines.
NOT_TYPED = {"profile", "selftest", "weights", "elastic", "measured"}
# A command to be copied is one line, however long the path in it is.
_COPIED = re.compile(r"  (?:sbatch|bash) ")
_TIME = re.compile(r"\b[\d.,]+ (?:us|ms|s|min)\b")  # how long a search took, which differs from run to run
SECTION = '{"zero_optimization": {"stage": 3}, "heterogeneity": {"cluster": "hexiseq-setting-1", "seq_len": 65536}}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("terminal")
    (made / "section.json").write_text(SECTION)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        for name in WRITES_FILES:
            _run(TYPED[name])
    return made


def _run(typed: str) -> None:
    try:
        main(typed.split())
    except SystemExit as end:
        assert end.code in (0, 1, 2, None)


def _printed(typed: str, columns: int, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> str:
    patch.setenv("COLUMNS", str(columns))
    capsys.readouterr()
    _run(typed)
    read = capsys.readouterr()
    return read.out + read.err


def _words(text: str) -> Counter[str]:
    """Words without frames; one that is cut by the edge of a cell is another word, unless it is cut at a hyphen."""
    return Counter(re.sub(r"[─┌┬┐├┼┤└┴┘│-]", " ", _TIME.sub("", text)).split())


@pytest.mark.parametrize("name", [name for name in TYPED if name not in WRITES_FILES])
def test_a_command_fits_80_columns_and_leaves_out_nothing(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    narrow = _printed(TYPED[name], COLUMNS, capsys, monkeypatch)
    assert [line for line in narrow.splitlines() if len(line) > COLUMNS and not _COPIED.match(line)] == []
    assert _words(narrow) == _words(_printed(TYPED[name], 1000, capsys, monkeypatch))


def test_every_command_is_looked_at() -> None:
    assert {typed.split()[0] for typed in TYPED.values()} | NOT_TYPED == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_page_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _printed(f"{command} --help", COLUMNS, capsys, monkeypatch)
    assert page.startswith("Usage: ds-hetero")
    assert [line for line in page.splitlines() if len(line) > COLUMNS] == []
    assert app.get_command(click.Context(app), command) is not None


def test_the_state_of_an_elastic_job_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    names = [f"a-node-with-a-long-name-{number}" for number in range(6)]
    segment = {"save": {"step": 1200}, "rank": 0, "name": "/dev/shm/ds_hetero-0/job/segment-0", "end_bytes": 2**32}
    report = {
        "job": "job", "node": names[0], "closed": None, "is_broken": False, "round": 3, "members": names,
        "newcomers": names, "segments": [segment], "free_bytes": 2**34, "events": [],
    }  # fmt: skip
    print_lines(*status_lines(report))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= COLUMNS and all(name in "\n".join(lines) for name in names)


def test_the_report_of_a_self_test_fits_80_columns() -> None:
    from rich.console import Console

    from ds_hetero.selftest.lines import Line
    from ds_hetero.selftest.report import Report

    kernels = {"torch": None, "triton": None, "flash_attn": "not installed"}
    rank = {"device": "NVIDIA GeForce RTX 4090", "capability": "8.9", "memory_gib": 23.6, "torch": "2.13.0",
            "cuda": "12.8", "nccl": "2.27.3", "driver": "570.86", "kernels": kernels,
            "native_types": ["float32", "float16", "bfloat16"]}  # fmt: skip
    report = Report(ranks=[rank] * 4, nodes=((0, 1, 2, 3),), seconds=21, seconds_of_checks={"training step": 12.0})
    detail = "loss, gradient norm, weights of one process to 2e-03, allowed 2e-02"
    report.lines.append(Line("training step, ZeRO-3 by weights, bfloat16", "pass", detail))
    out = io.StringIO()
    report.print(Console(file=out, width=COLUMNS))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert sum("0-3" in line for line in lines) == 1, "four ranks that are alike are one row"
    assert "PASS, 4 ranks, 21 s" in lines


# --- wrapping and colours -------------------------------------------------------------------------------


def test_a_long_line_goes_on_below_the_text_of_its_label() -> None:
    assert fitted_text("predicted:  914 ms per block, 26.4 s per step, 2,485 tokens/s", 40).splitlines() == [
        "predicted:  914 ms per block, 26.4 s per",
        "            step, 2,485 tokens/s",
    ]
    assert fitted_text("note: the network is that of the file, not of --network", 40).splitlines() == [
        "note: the network is that of the file,",
        "  not of --network",
    ]


def test_a_file_or_a_pipe_gets_whole_lines_and_a_word_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_width(io.StringIO()) is None
    assert fitted_text("a " * 100, None) == "a " * 100
    path = "/" + "folder/" * 20
    assert path in fitted_text(f"written to {path} at once", 40).splitlines()[1]
    monkeypatch.setenv("COLUMNS", "66")
    assert terminal_width(io.StringIO()) == 66


def test_a_narrow_table_keeps_words_and_units_whole_while_it_can() -> None:
    rows = [("proportional", "694 ms", "through the host's memory, by another way")]
    table = framed_table(("strategy", "time", "remark"), rows, width=46)
    assert max(map(len, table.splitlines())) == 46
    assert "proportional" in table and "694 ms" in table


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "stream", "is_coloured"), [
    (None, _Terminal(), True), ("NO_COLOR", _Terminal(), False), (None, io.StringIO(), False),
])  # fmt: skip
def test_colour_is_for_terminals(
    variable: str | None, stream: TextIO, is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    assert (coloured("fits", "good", stream) == "\033[32mfits\033[0m") == is_coloured
