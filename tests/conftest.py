"""Settings that every test shares."""

from __future__ import annotations

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of ranks where a test will use it."""
    with_ranks = [item for item in session.items if item.path.parent.name in ("dist", "integration")]
    if with_ranks and not session.config.option.collectonly:
        deepspeed = any(item.path.parent.name == "integration" for item in with_ranks)
        support.start_server(sorted({item.module.__name__ for item in with_ranks}), deepspeed=deepspeed)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
