"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch: ranks are processes, and cores are few

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
    """Add the option that runs sweeps whole."""
    parser.addoption("--whole-sweeps", action="store_true", help="run every case of tests marked sweep")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin out sweeps, and skip what needs a GPU where there is none."""
    if not config.option.whole_sweeps and not any("::" in arg for arg in config.args):  # named cases are run
        left_out = _left_out_of_sweeps(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _left_out_of_sweeps(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Cases of tests marked ``sweep(keep=n)`` beyond the n, evenly spaced, that stand for all of them.

    The n are of a test's slow cases where it has any; its other cases are not thinned out then.
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
    """Start the server of ranks where a test will use it."""
    rooms = {item: item.path.relative_to(support.ROOT).parts[1] for item in session.items}
    with_ranks = [item for item, room in rooms.items() if room in ("dist", "integration")]
    if with_ranks and not session.config.option.collectonly:
        deepspeed = "integration" in rooms.values()
        support.start_server(sorted({item.module.__name__ for item in with_ranks}), deepspeed=deepspeed)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
