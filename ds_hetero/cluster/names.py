"""Which card of the catalogue a person or a driver means: ``rtx4090``, ``A100 80GB PCIe``, ``NVIDIA H100 80GB HBM3``.

A name is a model, and maybe a form (SXM, PCIe, NVL) and a size of memory. The model has to be one of the spellings that
are listed here, to the letter: a card that is not in the catalogue is never taken for its neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import NamedTuple

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.common.reading import shortened
from ds_hetero.common.units import GIB
from ds_hetero.errors import ClusterError

MAX_TEXT = 100

_MAKER = {"cuda": "nvidia", "rocm": "amd", "hpu": "intel", "xpu": "intel", "cpu": ""}
_TESLA, _GEFORCE, _RTX = ("", "tesla"), ("", "rtx", "geforce", "geforcertx"), ("", "rtx")
_INSTINCT, _PLAIN = ("", "instinct", "radeoninstinct"), ("",)
_PRO = "pro6000blackwell"
# Where a model is not the first word of the catalogue's name: its spellings, and the brands that may precede them.
_MODELS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "RTX-PRO-6000": (("pro6000", "6000pro", _PRO, f"{_PRO}workstationedition", "6000blackwell", "6000"), _RTX),
    "RTX-6000-Ada": (("6000ada", "ada6000", "6000adageneration", "6000"), _RTX),
    "RTX-A6000": (("a6000", "6000"), _RTX),
    "RTX-3080-10GB": (("3080",), _GEFORCE),
    "RTX-3060-12GB": (("3060",), _GEFORCE),
    "RTX-3080-12GB": (("3080",), _GEFORCE),
    "RTX-4090-48GB": (("4090",), _GEFORCE),
    "RTX-4060Ti-16GB": (("4060ti",), _GEFORCE),
    "RTX-4060Ti-8GB": (("4060ti",), _GEFORCE),
    "RTX-5060Ti-16GB": (("5060ti",), _GEFORCE),
    "RTX-A5000": (("a5000", "5000"), _RTX),
    "RTX-A4000": (("a4000", "4000"), _RTX),
    "Quadro-RTX-8000": (("8000", "quadrortx8000"), _RTX),
    "RX-7900XTX": (("7900xtx", "rx7900xtx", "radeonrx7900xtx"), _PLAIN),
    "W7900": (("w7900", "prow7900", "radeonprow7900"), _PLAIN),
    "GTX-1080": (("1080", "gtx1080"), ("", "geforce")),
    "GTX-1080Ti": (("1080ti", "gtx1080ti"), ("", "geforce")),
    "GB10": (("gb10", "dgxspark", "spark"), _PLAIN),
    "Titan-RTX": (("titanrtx", "rtxtitan"), _PLAIN),
    "GB200-186GB": (("gb200", "gb200nvl72"), _PLAIN),
    "GB300-279GB": (("gb300", "gb300nvl72"), _PLAIN),
    "MI250X": (("mi250x", "mi250xmi250"), _INSTINCT),
    "Gaudi-2": (("gaudi2", "gaudi", "hl225h"), ("", "habana")),
    "Gaudi-3": (("gaudi3", "gaudi", "hl325l"), ("", "habana")),
    "Max-1550": (("max1550", "gpumax1550", "datacentergpumax1550"), _PLAIN),
    "Arc-B580": (("b580", "arcb580"), _PLAIN),
}
# What people mean who name neither form nor memory; it is said which one was taken.
_USUAL = ("H100-SXM-80GB", "A100-SXM-80GB", "RTX-3080-10GB", "RTX-4060Ti-16GB", "RTX-4090", "GH200-96GB")
_MEMORY = re.compile(r"(?<![a-z0-9])(\d{1,4})\s*(?:gib|gb|g)(?![a-z0-9])")
_FORM = re.compile(r"(?<![a-z0-9])(sxm\d?|hgx|dgx|pcie|pci-e|nvl)(?![a-z0-9])")
_NOISE = re.compile(r"(?<![a-z0-9])(hbm\d?e?|oam)(?![a-z0-9])")


class Named(NamedTuple):
    """A card that was found by its name."""

    name: str  # of the catalogue
    others: tuple[str, ...] = ()  # of the same model, which the text would fit as well


class _Words(NamedTuple):
    """A name in parts: model, form and memory, the last two None where they are not said."""

    model: str
    form: str | None
    gib: int | None


def card_named(text: str) -> Named:
    """Find the card that a person means.

    Raises:
        ClusterError: the catalogue does not have it, and the message has the three nearest names; or the text fits
            several cards, and the message lists them.
    """
    words = _words(text)
    model = _spellings().get(words.model, ())
    matches = [name for name in model if _fits(name, words)]
    usual = [name for name in matches if name in _USUAL]
    if len(matches) == 1 or usual:
        taken = (usual or matches)[0]
        return Named(taken, tuple(name for name in matches if name != taken))
    if matches:
        raise ClusterError(f"{shortened(text)} may be {' or '.join(matches)}. Say which one.")
    if model:
        raise ClusterError(f"{shortened(text)}: of this model the catalogue has {', '.join(model)} only.")
    raise ClusterError(
        f"the catalogue has no card {shortened(text)}; the nearest names are {', '.join(_nearest(words.model))}. Take "
        "one of these if it is the card you mean, or describe yours in a cluster file under devices, for which "
        "ds-hetero cards NAME prints a stub."
    )


def catalogue_name(driver_name: str, memory_bytes: int) -> str | None:
    """The catalogue's name of a device that its driver calls, say, ``NVIDIA A100-SXM4-80GB``; None if it has none.

    Args:
        driver_name: as PyTorch gives it.
        memory_bytes: as PyTorch gives it; decides where the name says nothing of memory.
    """
    words = _words(driver_name)
    matches = [name for name in _spellings().get(words.model, ()) if _fits(name, words)]

    def mismatch(name: str) -> tuple[float, bool]:
        return abs(CATALOGUE[name].device.memory_bytes - memory_bytes), _form_of(name) not in (None, "SXM")

    return min(matches, key=mismatch, default=None)


def _words(text: str) -> _Words:
    lower = text.lower()[:MAX_TEXT]
    memory, form = _MEMORY.search(lower), _FORM.search(lower)
    for pattern in (_MEMORY, _FORM, _NOISE):
        lower = pattern.sub(" ", lower)
    model = re.sub(r"[^a-z0-9+]", "", lower)
    kind = None
    if form:
        kind = {"s": "SXM", "h": "SXM", "d": "SXM", "p": "PCIe", "n": "NVL"}[form[1][0]]
    return _Words(model, kind, int(memory[1]) if memory else None)


def _form_of(name: str) -> str | None:
    return next((form for form in ("SXM", "PCIe", "NVL") if f"-{form}" in name), None)


def _fits(name: str, words: _Words) -> bool:
    entry = CATALOGUE[name]
    if words.gib is not None and words.gib * GIB != entry.device.memory_bytes:
        return False
    form = _form_of(name) or ("PCIe" if entry.link_name.startswith("PCIe") else None)
    return words.form is None or words.form == form


@cache
def _spellings() -> dict[str, tuple[str, ...]]:
    """Cards by every spelling of their models, without separators."""
    table: dict[str, list[str]] = {}
    for name, entry in CATALOGUE.items():
        if name in _MODELS:
            models, brands = _MODELS[name]
        elif name.startswith("RTX-"):
            models, brands = (name[4:].lower(),), _GEFORCE
        else:
            models, brands = (name.split("-")[0].lower(),), _INSTINCT if entry.platform == "rocm" else _TESLA
        for maker in {"", _MAKER[entry.platform]}:
            for brand in brands:
                for model in models:
                    table.setdefault(maker + brand + model, []).append(name)
    return {spelling: tuple(names) for spelling, names in table.items()}


def _nearest(model: str) -> list[str]:
    """The three models whose spellings are most like ``model``, each by the first of its cards."""
    best: dict[str, float] = {}
    for spelling, names in _spellings().items():
        best[names[0]] = max(best.get(names[0], 0.0), _ratio(model, spelling))
    return sorted(best, key=lambda name: -best[name])[:3]


def _ratio(model: str, spelling: str) -> float:
    """Likeness of two spellings; one that begins the other is more like it than one with another letter."""
    begins = bool(model) and spelling.startswith(model)
    return max(SequenceMatcher(None, model, spelling, autojunk=False).ratio(), 0.9 * begins)
