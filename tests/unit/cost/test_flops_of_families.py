"""FLOPs of decoders: what the planner counts, beside torch's counter on the models that transformers builds."""

from __future__ import annotations

import pytest

from ds_hetero.cost.terms.flops import training_flops, visible_share
from ds_hetero.models.configs import model_from_config
from ds_hetero.models.shapes import ModelSpec
from tests.families import FAMILIES, VARIANTS, Family, forward_flops, relative_error

MAX_FLOPS_ERROR = 0.01
NUM_TOKENS = 16
PLANNED = tuple(
    family
    for family in (*FAMILIES, *VARIANTS)
    if isinstance(family.planned(), ModelSpec)
    and family.model_type != "mllama"  # its layers of cross attention run where there are images
)


@pytest.mark.sweep(keep=40)
@pytest.mark.parametrize("family", PLANNED, ids=[f"{family.model_type} {family.changes}" for family in PLANNED])
def test_a_forward_has_the_flops_that_torch_counts(family: Family) -> None:
    spec = family.planned()
    assert isinstance(spec, ModelSpec)
    # Masks do not make eager attention compute less; a backward is twice a forward.
    counted = training_flops(spec, NUM_TOKENS, causal=False) / 3 * NUM_TOKENS
    assert abs(relative_error(counted, forward_flops(family, NUM_TOKENS))) < MAX_FLOPS_ERROR


@pytest.mark.parametrize(("window", "seq_len"), [(1, 64), (16, 64), (64, 64), (200, 64)])
def test_a_window_computes_its_band(window: int, seq_len: int) -> None:
    """Pairs of a query and a key before it, or half of the one with itself, as the continuous formula has them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 8, "vocab_size": 8}
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    spec = model_from_config({**sizes, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": window}, "m")
    full_pairs = sum(query + 0.5 for query in range(seq_len))
    band_pairs = sum(min(query + 0.5, window) for query in range(seq_len))
    expected = (3 * full_pairs + band_pairs) / (4 * full_pairs)
    assert visible_share(spec, seq_len) == pytest.approx(expected, abs=2e-4)
