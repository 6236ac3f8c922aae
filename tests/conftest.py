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
    kinds = {item.path.parent.name for item in session.items}
    if kinds & {"dist", "integration"} and not session.config.option.collectonly:
        support.start_server(deepspeed="integration" in kinds)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
