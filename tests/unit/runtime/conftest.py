"""Fixtures for tests of what losses are made of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds_hetero.engine.asked_hooks import install_always
from ds_hetero.engine.patching import Patches
from ds_hetero.runtime.data.saved_hooks import torch_names_hooks


@pytest.fixture(params=["torch names hooks", "hooks are asked"])
def found_hooks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Find hooks on saved tensors as with torch 2.10 and later, and as with torch 2.9."""
    patches = Patches()
    if request.param == "hooks are asked":
        install_always(patches)
    elif not torch_names_hooks():
        pytest.skip("this torch does not name hooks")
    yield
    patches.undo()
