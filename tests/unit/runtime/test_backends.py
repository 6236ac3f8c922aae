"""Which backend carries a rank's tensors, whatever `init_process_group` was told."""

from __future__ import annotations

import pytest

from ds_hetero.errors import ConfigError
from ds_hetero.runtime import backends
from ds_hetero.runtime.backends import backend_of, gathers_unequal_parts, message_device, pairs_by_order


@pytest.fixture
def group_of(monkeypatch):
    def configure(config: str, device: str) -> None:
        monkeypatch.setattr(backends, "get_backend_config", lambda group: config)
        monkeypatch.setattr(backends, "default_device", lambda: backends.torch.device(device))
        monkeypatch.setattr(backends.torch.cuda, "current_device", lambda: 1)

    return configure


@pytest.mark.parametrize(
    ("config", "device", "backend", "by_order", "carrier"),
    [
        ("cpu:gloo", "cpu", "gloo", False, "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo", False, "cpu"),
        ("cuda:nccl", "cuda", "nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl", True, "cuda"),  # init_process_group() without a name
        ("cuda:nccl,cpu:gloo", "cpu", "gloo", False, "cpu"),  # DS_ACCELERATOR=cpu on a machine with GPUs
        ("cpu:gloo", "cuda", "gloo", False, "cpu"),  # a group beside it, for the host's memory
    ],
)
def test_the_backend_is_that_of_the_device(group_of, config, device, backend, by_order, carrier):
    group_of(config, device)
    assert backend_of() == backend and pairs_by_order() is by_order and message_device().type == carrier
    assert gathers_unequal_parts() is (backend == "nccl")


@pytest.mark.parametrize(
    ("config", "device", "words"),
    [
        ("cuda:nccl", "cpu", ("computes on cpu", '"cuda:nccl"', "Give init_process_group a backend for cpu")),
        ("cpu:gloo,cuda:ucc", "cuda", ('uses "ucc" for cuda tensors', "nccl and gloo")),
        ("cpu:mpi", "cpu", ('uses "mpi"',)),
    ],
)
def test_a_backend_whose_rules_are_not_known_is_refused_by_name(group_of, config, device, words):
    group_of(config, device)
    with pytest.raises(ConfigError) as caught:
        message_device()
    assert all(word in str(caught.value) for word in words)
