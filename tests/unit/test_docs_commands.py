"""Every command and snippet of README.md and docs/ that needs no ranks runs and prints what the page says.

Those that train are run by tests/integration/test_docs_commands.py; the rest say on the page why they are not run.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex

import pytest
import yaml

from ds_hetero.cli import main
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.values.plans import read_plan
from ds_hetero.values.section import read_section
from tests.markdown import BLOCKS, Block, write_files

RUNNABLE = [block for block in BLOCKS if block.runnable and not block.not_run and not block.on_ranks]
DATA = [block for block in BLOCKS if block.language in ("json", "yaml")]


def _name(block: Block) -> str:
    return block.name


def _case(block: Block) -> object:
    """Searches of pipelines take seconds; `tests/unit/planner/pipelines` has their commands in a quick run."""
    return pytest.param(block, marks=[pytest.mark.slow] * ("--parallel full" in block.text))


@pytest.mark.parametrize("block", [*map(_case, RUNNABLE)], ids=_name)
def test_block_runs_and_prints_what_the_page_says(block, tmp_path, monkeypatch):
    write_files(block.page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")  # no line is wrapped
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.language == "python":
            exec(compile(block.text, block.name, "exec"), {"__name__": "docs"})
        else:
            for command in block.text.replace("\\\n", " ").splitlines():
                _run(command)
    shown = [_words(line) for line in printed.getvalue().splitlines()]
    for line in (block.prints or "").splitlines():
        assert _words(line) in shown, f"{block.name} does not print: {line}\n{printed.getvalue()}"


def _run(command: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    assert program == "ds-hetero", f"{command!r} is not run by this test: say why above the block"
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert not code, f"{command!r} ends with {code}"


def _words(line: str) -> list[str]:
    """Words of a line, without the frame of a table and times that differ from run to run."""
    return re.sub(r"searched for [\d.]+ \w+", "", re.sub("[│┃]", " ", line)).split()


def test_every_block_of_commands_is_run_or_says_why_not():
    assert len(RUNNABLE) >= 15
    for block in BLOCKS:
        assert block.language in ("bash", "python", "json", "yaml", "text", "console"), block.name
        if block.not_run:
            assert len(block.not_run) > 10 and block.runnable, block.name


@pytest.mark.parametrize("block", DATA, ids=_name)
def test_file_shown_on_a_page_is_valid(block):
    text = block.text
    data = yaml.safe_load(text) if block.language == "yaml" else json.loads(f"{{{text}}}" if text[0] == '"' else text)
    if "nodes" in data:
        assert cluster_from_dict(data).num_ranks
    elif "heterogeneity" in data:
        assert read_section(data["heterogeneity"]) is not None
    elif "lengths" in data:
        assert all(length >= 1 for length in data["lengths"])
    else:
        assert read_plan(data).pipelines
