"""Find out whether the installed NCCL lets several ranks share a GPU; if not, parts of several ranks measure nothing.

It runs in a process of the part "start" (`benchmarks.first_gpu.runner`), because a runner must not call CUDA.
"""

from __future__ import annotations

_MIN_NCCL = (2, 30)  # the first with NCCL_MULTI_RANK_GPU_ENABLE; tried: 2.28 refuses ("Duplicate GPU"), 2.32 does not


def refusal_of_installed() -> str:
    """Return why the installed library of collectives refuses ranks on one GPU; empty if it does not."""
    import torch

    from ds_hetero.runtime.devices import collectives_library

    return refusal(*collectives_library(), torch.version.cuda)


def refusal(library: str, version: str, cuda: str | None) -> str:
    """Return why ``library`` refuses ranks on one GPU, and what to install; empty if it does not.

    Args:
        version: such as ``"2.28.9"``.
        cuda: release that torch was built for; None for AMD's.
    """
    major, minor = map(int, version.split(".")[:2])
    if (major, minor) >= _MIN_NCCL:
        return ""
    least = ".".join(map(str, _MIN_NCCL))
    install = f"pip install -U nvidia-nccl-cu{cuda.partition('.')[0]}" if cuda else f"a ROCm with RCCL {least}"
    return f"{library} {version} refuses several ranks on one card, {least} is the first that takes them: {install}"
