"""The planner of the built site in a real Chromium: what it answers is what the command line answers, to 1e-9.

Nothing is loaded from anywhere but the site's own server. Budget: 90 s.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.reported import command
from tests.support import ROOT

pytestmark = pytest.mark.slow

# Cards, model, tokens, and further options of a command line.
INPUTS = (
    ("4090,3090x2", "llama-3.2-1b", "32K", "--tiled-loss"),
    ("5090,4090,3090,3080,4080,a6000,a5000,3060", "llama-3.2-1b", "64K", "--tiled-loss"),
    ("3090x2 | 5090", "llama-3.1-8b", "32K", "--network 10GbE --tiled-loss --tiled-mlp --offload-optimizer"),
    ("3090x2 | 5090", "llama-3.1-8b", "8K", "--network 10GbE --train lora --tiled-loss --tiled-mlp"),
    ("4090,3090", "llama-3.1-8b", "8K", "--train qlora --tiled-loss --tiled-mlp"),
    ("4090,3090", "qwen3-32b", "8K", "--train qlora --tiled-loss --tiled-mlp"),
    ("4090,3090", "Qwen/Qwen3-4B", "16K", "--tiled-loss --tiled-mlp --offload-optimizer --price 4090=0.4,3090=0.2"),
    ("4090,3090x2", "llama-3.1-8b", "32K", "--tiled-loss"),  # does not fit
    ("4xA100-80GB | 4xL40S", "llama-3.1-8b", "1M", "--network 25 --tiled-loss --tiled-mlp --offload-optimizer"),
    ("4xA100-80GB | 4xL40S", "llama-3.1-8b", "1M", "--network 25 --tiled-loss --offload-activations"),
    ("8xH100 | 8xA100", "llama-3.1-8b", "128K", "--network 25"),
    ("8xH100 | 8xA100", "gpt-13b", "64K", "--network 200Gbit/s"),
    ("2xH100 | 2xA100-80GB", "mixtral-8x7b", "16K", "--network 50 --train lora --tiled-loss"),
    ("8xMI300X | 8xH100", "llama-3.1-70b", "64K", "--network 50 --tiled-loss"),
    ("a100-40gbx4,a100-80gbx4", "qwen3-14b", "128K", "--tiled-loss"),
    ("3090@4x4,4090@4x16", "qwen3-0.6b", "100000", ""),
    ("5090", "llama-3.2-1b", "16K", "--tiled-loss --price 5090=0.5"),
    ("t4x4 | v100x2", "qwen3-1.7b", "16K", "--network 1.25 --tiled-loss"),
    ("gb10 | gb10", "qwen3-8b", "32K", "--network 25 --train lora --tiled-loss"),
    ("4090,warp9", "llama-3.2-1b", "32K", ""),  # no such card
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built site's address on this machine."""
    if not (ROOT / ".cache" / "planner" / "fetched").exists():
        pytest.skip("no Python for browsers: .venv/bin/python .ci/planner.py fetches it")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def planner(browser: Any, site: str) -> Iterator[Any]:
    """The page, opened once; what its console complains of, and requests to elsewhere, fail the test that sees them."""
    page = browser.new_page()
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    own = (site, "blob:", "about:", "data:")
    page.context.on("request", lambda r: None if r.url.startswith(own) else page.complaints.append(r.url))
    page.goto(f"{site}planner/")
    yield page
    page.close()


def _hash(gpus: str, model: str, tokens: str, options: str) -> str:
    """The address of an answer: flags are 1 or 0."""
    values = {
        "gpus": gpus,
        "model": model,
        "seq-len": tokens,
        "tiled-loss": "0",
        "network": "",
        "train": "",
        "price": "",
    }
    values |= dict.fromkeys(("tiled-mlp", "offload-optimizer", "offload-activations"), "0")
    words = iter(shlex.split(options))
    for word in words:
        name = word.removeprefix("--")
        values[name] = "1" if values.get(name) == "0" else next(words)
    return urlencode(values)


def _answer(page: Any, address: str) -> None:
    """Go to the address of an answer, and wait for it."""
    page.evaluate("delete document.getElementById('planner').dataset.answered")
    page.evaluate(f"location.hash = {json.dumps(address)}")
    page.wait_for_selector("#planner[data-answered]", timeout=300_000)


@pytest.mark.parametrize("inputs", INPUTS, ids=" ".join)
def test_the_page_answers_what_the_command_line_answers(planner, capsys, inputs):
    gpus, model, tokens, options = inputs
    _answer(planner, _hash(*inputs))
    arguments = ("--gpus", gpus, "--model", model, "--seq-len", tokens, *shlex.split(options), "--json")
    code, said, err = command(capsys, "plan", *arguments)
    if code == 0:
        assert _numbers(json.loads(planner.text_content("#planner-json code"))) == _numbers(json.loads(said))
        frame = planner.frame_locator(".planner-page")
        assert frame.locator("h2").first.inner_text() == "In short"
    else:
        assert planner.locator(".planner-error").all_inner_texts() == err.splitlines()
    assert planner.complaints == []


def _numbers(value: Any) -> Any:
    """The same with numbers that are equal to 1e-9, and without the time of the search."""
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items() if key != "search_s"}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return pytest.approx(value, rel=1e-9, abs=0) if isinstance(value, float) else value


def test_fit_answers_in_the_page(planner):
    _answer(planner, _hash("4090,3090", "llama-3.2-1b", "8K", "--tiled-loss"))
    planner.evaluate("delete document.getElementById('planner').dataset.answered")
    planner.click("#planner-fit")
    planner.wait_for_selector("#planner[data-answered]", timeout=300_000)
    assert "llama-3.2-1b, 8,192 tokens x 1, ZeRO stage 3: fits" in planner.inner_text("#planner-answer")
    assert planner.complaints == []
