"""Published figures of Zeppelin (EuroSys 2026), and constants fitted to its traces.

Figure 8, throughput by model, data set and context, is a drawing without numbers: the text gives the mean and the best
gain of its cells. Table 2, the length distributions, is in `ds_hetero.planner.documents.length_distributions`.
"""

from __future__ import annotations

from dataclasses import replace

from ds_hetero.models.shapes import ModelSpec

GAIN_MEAN, GAIN_BEST = 2.80, 6.60  # section 5.1, over Transformer Engine's context parallelism
ABLATION = {"routing": 1.6, "engine": 3.2, "routing + engine": 3.51, "with remap": 3.64}  # section 5.3, ArXiv, up to
TOKENS_PER_GPU = 4096
CONTEXTS = (65_536, 131_072, 262_144)

# Section 5.4.1: 3B, 16 GPUs of cluster A, 64K tokens: rounds x (forward + backward) of one.
ROUNDS_MS = {"te": (16, 2.18, 4.41), "zeppelin": (8, 0.738, 1.95)}

# What is fitted, and from which figure; none from a speed-up.
FITTED = {
    "attention_share": (0.45, "a round of 8 ranks with 4K tokens each computes for 0.738 ms (section 5.4.1)"),
    "routed_nics": (2.18 / 1.3, "routing brings a round from 2.18 ms to 1.3 ms (section 5.4.1)"),
    "remap_s": (0.45e-3, "14 to 16 ms of remapping in the forward of 32 layers (Table 3)"),
}


def _llama(name: str, layers: int, hidden: int, heads: int, mlp: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        mlp_size=mlp,
        vocab_size=32_000,
        gated_mlp=True,
    )


# Section 5: LLaMA with multi-head attention; the sizes are those of the models that usually go by these names. No model
# goes by 8x550M. We take a LLaMA of 551 million weights with eight MLPs in the place of one, and two for each token.
MODELS = {
    "3b": _llama("3b", 26, 3200, 32, 8640),
    "7b": _llama("7b", 32, 4096, 32, 11008),
    "13b": _llama("13b", 40, 5120, 40, 13824),
    "30b": _llama("30b", 60, 6656, 52, 17920),
    "8x550m": replace(_llama("8x550m", 16, 1536, 24, 4096), num_experts=8, experts_per_token=2),
}

# Section 5: peak FLOP/s of a GPU, bytes/s of a NIC, NICs of a node of 8 GPUs, bytes/s of NVLink one way.
MACHINES = {
    "A": {"flops_per_s": 312e12, "nic_bytes_per_s": 25e9, "nics": 4, "link_bytes_per_s": 200e9},
    "B": {"flops_per_s": 989e12, "nic_bytes_per_s": 25e9, "nics": 8, "link_bytes_per_s": 200e9},  # NICs as of A
    "C": {"flops_per_s": 989e12, "nic_bytes_per_s": 50e9, "nics": 8, "link_bytes_per_s": 450e9},
}

# Model, cluster and tensor parallelism of the 36 cells, three data sets and three contexts each. The cluster of the
# mixture of experts is not printed.
CELLS = (("7b", "A", 1), ("13b", "A", 2), ("30b", "C", 2), ("8x550m", "A", 1))
