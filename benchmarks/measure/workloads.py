"""The cost model's workload of the small jobs that run on this machine."""

from __future__ import annotations

from ds_hetero.cost import Workload


def workload(tokens: int) -> Workload:
    """Return a step of the benchmarks' engines: fp32, ZeRO-1, no checkpointing, loss of all tokens at once."""
    return Workload(
        seq_len=tokens,
        zero_stage=1,
        activation_checkpointing=False,
        tiled_logits=False,
        element_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=12,
    )
