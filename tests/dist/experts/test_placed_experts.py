"""Experts that are divided among ranks, against transformers' own module with all of them."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.engine.forward_mode import comparing_forwards
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model import placed_experts
from ds_hetero.frameworks.transformers.model.placed_experts import ExpertLayer, check_placeable, place_experts
from tests.support import run_ranks

WIDTH, INNER = 8, 6
CLOSE = {"rtol": 1e-11, "atol": 1e-11}

# Family: configuration class, module of experts, changed keys.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralExperts", {"intermediate_size": INNER}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", {"moe_intermediate_size": INNER}),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", {"intermediate_size": INNER}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3Experts", {"moe_intermediate_size": INNER}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeExperts", {"moe_intermediate_size": INNER}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeExperts", {"moe_intermediate_size": INNER}),
    "nemotron_h": ("NemotronHConfig", "NemotronHExperts", {"moe_intermediate_size": INNER}),
}


def experts_of(family: str, num_experts: int, implementation: str, seed: int) -> nn.Module:
    """The module that transformers makes for a layer's experts, with random weights in float64."""
    import transformers

    config_name, class_name, changes = FAMILIES[family]
    keys = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), num_experts)
    config = getattr(transformers, config_name)(hidden_size=WIDTH, hidden_act="silu", **changes)
    for key, value in keys.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._experts_implementation_internal = implementation
    file = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[class_name])
    module: nn.Module = getattr(file, class_name)(config).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
    return module


def routing(draw: random.Random, tokens: int, num_experts: int, top_k: int) -> Tensor:
    """Experts of every token, [tokens, top_k]; of some draws a few experts get all."""
    hot = draw.choice((num_experts, max(top_k, num_experts // 3)))
    chosen = [draw.sample(range(hot), top_k) for _ in range(tokens)]
    return torch.tensor(chosen, dtype=torch.int64).view(tokens, top_k)


def equals_one_process(rank: int, seed: int) -> tuple[int, int]:
    """Compare a draw; return the collectives of the forward, and of both passes."""
    draw, size = random.Random(seed), dist.get_world_size()
    num_experts = draw.randint(1, 16)
    top_k = draw.randint(1, min(8, num_experts))
    shares = [draw.choice((0, 1, 1, 2, 3, 5)) for _ in range(size)]
    shares[draw.randrange(size)] += 1  # one has some
    tokens = [draw.choice((0, 1, 3, 7)) for _ in range(size)]
    tokens[draw.randrange(size)] += 1
    family = draw.choice(list(FAMILIES))
    implementation = draw.choice(("eager", "batched_mm"))  # grouped_mm takes no float64
    ids = routing(draw, sum(tokens), num_experts, top_k)
    generator = torch.Generator().manual_seed(seed)
    random_like = partial(torch.randn, generator=generator, dtype=torch.float64)
    x, dy, weights = random_like(sum(tokens), WIDTH), random_like(sum(tokens), WIDTH), random_like(sum(tokens), top_k)

    whole = experts_of(family, num_experts, implementation, seed)
    whole_x, whole_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    whole_y = whole(whole_x, ids, whole_weights)
    whole_y.backward(dy)

    module = experts_of(family, num_experts, implementation, seed)
    layer = placed(module, shares, rank)
    part = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    own_x, own_weights = x[part].clone().requires_grad_(), weights[part].clone().requires_grad_()
    # In place of CommDebugMode, which cannot see a module run outside of another one.
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as messages:
        own_y = layer.run(own_x, ids[part], own_weights)
        forward = messages.call_count
        own_y.backward(dy[part])
    told = f"seed {seed}: {family} {implementation}, {num_experts} experts by {shares}, top {top_k}, tokens {tokens}"
    close = partial(torch.testing.assert_close, **CLOSE, msg=lambda text: f"{told}: {text}")
    close(own_y, whole_y[part])
    close(own_x.grad, whole_x.grad[part])
    close(own_weights.grad, whole_weights.grad[part])
    start, stop = layer.range
    for (name, own), wanted in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert own.shape[0] == stop - start, (told, name)
        close(torch.zeros_like(own) if own.grad is None else own.grad, wanted.grad[start:stop])
    return forward, messages.call_count


def placed(module: nn.Module, shares: list[int], rank: int) -> ExpertLayer:
    """The module's layer, after its experts were divided among all ranks."""
    plan = SimpleNamespace(schedules=[SimpleNamespace(ranks=tuple(range(len(shares))))])
    replica: Any = SimpleNamespace(sp_rank=rank, sp_group=dist.group.WORLD, plan=plan, replica_id=0)
    place_experts(nn.ModuleList([module]), shares, replica)
    layer: ExpertLayer = vars(module)["_ds_hetero_layer"]
    return layer


def many(rank: int, seeds: range) -> list[tuple[int, int]]:
    return [equals_one_process(rank, seed) for seed in seeds]


@pytest.mark.parametrize("strict", [False, True], ids=["gloo", "NCCL's rules"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_layers_equal_one_process_with_five_messages(world_size: int, strict: bool) -> None:
    """Counts, out and back; in the backward out and back."""
    seeds = range(100 * world_size, 100 * world_size + 6)
    assert run_ranks(many, world_size, seeds, strict=strict) == [[(3, 5)] * len(seeds)] * world_size


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8])
def test_two_hundred_draws_equal_one_process(world_size: int) -> None:
    run_ranks(many, world_size, range(1000 * world_size, 1000 * world_size + 29))


def untrained_input(rank: int) -> None:
    """Tokens without a gradient, as after frozen embeddings, and one rank without experts: all ranks run backward."""
    module = experts_of("mixtral", 3, "eager", 0)
    layer = placed(module, [0, 1, 2], rank)
    ids = torch.full((4, 1), 2)  # all choose one expert, so that rank 1 gets no row
    out = layer.run(torch.ones(4, WIDTH, dtype=torch.float64), ids, torch.ones(4, 1, dtype=torch.float64))
    out.sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all((gradient is not None) == (rank == 2) for gradient in gradients)


def test_every_rank_runs_the_backward_of_tokens_without_a_gradient() -> None:
    run_ranks(untrained_input, 3, strict=True)


def through_the_registry(rank: int) -> None:
    """The module's own forward, under transformers' name of ours; a forward by itself is refused."""
    patches = Patches()
    placed_experts.install(patches)
    whole, module = (experts_of("qwen3_moe", 5, "eager", 1) for _ in range(2))
    placed(module, [1, 4], rank)
    x, ids = torch.ones(2, WIDTH, dtype=torch.float64), torch.tensor([[0, 4], [3, 2]])
    weights = torch.ones(2, 2, dtype=torch.float64)
    with comparing_forwards():
        torch.testing.assert_close(module(x, ids, weights), whole(x, ids, weights), **CLOSE)
    with pytest.raises(ModelError, match="a forward needs every rank of the replica"):
        module(x, ids, weights)
    patches.undo()


def test_transformers_finds_placed_experts_by_name() -> None:
    run_ranks(through_the_registry, 2)


def test_models_whose_experts_cannot_be_divided_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="Linear has none"):
        check_placeable(nn.Linear(1, 1))
    module = experts_of("mixtral", 4, "eager", 0)
    check_placeable(module)
    module.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ModelError, match=r"extra .* is not a plain weight"):
        check_placeable(module)

    class PlainExperts(nn.ModuleList):
        """A list of experts, which transformers' registry does not know."""

    with pytest.raises(ModelError, match="PlainExperts of ModuleList does not use"):
        check_placeable(nn.ModuleList([PlainExperts()]))
