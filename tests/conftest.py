"""Settings that every test shares."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch: ranks are processes, and cores are few

import hypothesis
import pytest

from tests import support

# The same examples in every run and on every machine: a failure is a failure for everybody.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the fork server import DeepSpeed where a test of this run will use it."""
    if any("integration" in item.path.parts for item in items):
        support.preload_deepspeed()
