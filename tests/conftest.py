"""Options, skips and the fork server that every test shares."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch: ranks are processes, and cores are few
# readline, which pytest imports, tells child processes the width of the terminal behind Python's back: what they print
# would be wrapped.
os.unsetenv("COLUMNS")

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests import support

# The same examples in every run and on every machine: a failure is a failure for everybody.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, database=None)
hypothesis.settings.load_profile("repeatable")
# Hypothesis mixes in constants from the modules that happen to be loaded: a test would see other examples alone than in
# the suite.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run sweeps whole, and half of the tests under the strict group."""
    parser.addoption("--whole-sweeps", action="store_true", help="run every case of tests marked sweep")
    parser.addoption(
        "--strict-half",
        type=int,
        choices=(0, 1),
        help="run this half of the tests on ranks that wait as on NCCL (tests/strict_group.py), the other half on gloo",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin out sweeps; skip what needs a GPU where there is none, and what is measured under the strict group."""
    if not config.option.whole_sweeps and not any("::" in arg for arg in config.args):  # named cases are run
        left_out = _left_out_of_sweeps(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if support.is_strict():
        on_gloo_alone = pytest.mark.skip(reason="measures time or memory, in which the strict group's own counts")
        for item in items:
            if item.get_closest_marker("measured"):
                item.add_marker(on_gloo_alone)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let ranks and launchers of a test in the strict half see STRICT_GROUP=1, in its fixtures too."""
    half = item.config.option.strict_half
    if half is None or support.half_of(item.nodeid) != half or support.is_strict():
        return (yield)
    if item.get_closest_marker("measured"):
        return (yield)
    os.environ["STRICT_GROUP"] = "1"
    try:
        return (yield)
    finally:
        del os.environ["STRICT_GROUP"]


@pytest.fixture(autouse=True)
def _same_environment() -> Generator[None]:
    with support.same_environment():
        yield


def _left_out_of_sweeps(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases of tests marked ``sweep(keep=n)`` that are left out: all but n, evenly spaced.

    If a test has slow cases, the n are of these, and its other cases all run.
    """
    sweeps: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps.setdefault((item.path, item.originalname), []).append(item)
    left_out: set[pytest.Item] = set()
    for of_test in sweeps.values():
        cases = [item for item in of_test if item.get_closest_marker("slow")] or of_test
        marker = cases[0].get_closest_marker("sweep")
        assert marker is not None
        keep = min(marker.kwargs["keep"], len(cases))
        left_out |= {*cases} - {cases[(2 * i + 1) * len(cases) // (2 * keep)] for i in range(keep)}
    return left_out


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server of ranks if a collected test will use it."""
    rooms = {item: item.path.relative_to(support.ROOT).parts[1] for item in session.items}
    with_ranks = [item for item, room in rooms.items() if room in ("dist", "integration")]
    if with_ranks and not session.config.option.collectonly:
        deepspeed = "integration" in rooms.values()
        support.start_server(sorted({item.module.__name__ for item in with_ranks}), deepspeed=deepspeed)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
