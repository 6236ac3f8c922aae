"""Look-up of catalogue cards by the names that people and drivers use: ``rtx4090``, ``NVIDIA H100 PCIe``.

A name has a model, and perhaps a form (SXM, PCIe, NVL) and a size of memory: ``A100 80GB PCIe``. The model must equal
one of the spellings in this file, so a card that the catalogue lacks is never mistaken for a similar one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import product
from typing import NamedTuple

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.common.reading import shortened
from ds_hetero.common.units import GIB
from ds_hetero.errors import ClusterError

MAX_TEXT = 100  # characters of a name that are read; the rest is ignored

_MAKER = {"cuda": "nvidia", "rocm": "amd", "hpu": "intel", "xpu": "intel", "cpu": ""}
# Brands that may precede a model; the empty brand is for a model alone.
_TESLA, _GEFORCE, _RTX = ("", "tesla"), ("", "rtx", "geforce", "geforcertx"), ("", "rtx")
_INSTINCT, _PLAIN = ("", "instinct", "radeoninstinct"), ("",)
_PRO = "pro6000blackwell"
# Spellings and brands of cards whose model is not simply the first word of the catalogue's name.
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
# The card that is chosen for a name without form and memory; a remark says which one was chosen.
_USUAL_CARDS = ("H100-SXM-80GB", "A100-SXM-80GB", "RTX-3080-10GB", "RTX-4060Ti-16GB", "RTX-4090", "GH200-96GB")
_MEMORY = re.compile(r"(?<![a-z0-9])(\d{1,4})\s*(?:gib|gb|g)(?![a-z0-9])")
_FORM = re.compile(r"(?<![a-z0-9])(sxm\d?|hgx|dgx|pcie|pci-e|nvl)(?![a-z0-9])")
_IGNORED = re.compile(r"(?<![a-z0-9])(hbm\d?e?|oam)(?![a-z0-9])")


class CardMatch(NamedTuple):
    """The card that was chosen for a name."""

    name: str  # name in the catalogue
    alternatives: tuple[str, ...] = ()  # other cards of the model that fit the name, too


class _Words(NamedTuple):
    """Parts of a card's name."""

    model: str  # letters and digits only, such as ``nvidiaa100``
    form: str | None  # ``"SXM"``, ``"PCIe"`` or ``"NVL"``; None if the name has none
    gib: int | None  # memory; None if the name has none


def card_named(text: str) -> CardMatch:
    """Return the catalogue card for a name that a person typed.

    Raises:
        ClusterError: the catalogue lacks the card (the message has the three most similar names), or the name fits
            several cards and none of them is the usual one (the message lists them).
    """
    words = _words(text)
    cards_of_model = _spellings().get(words.model, ())
    matches = [name for name in cards_of_model if _has_form_and_memory(name, words)]
    usual = [name for name in matches if name in _USUAL_CARDS]
    if len(matches) == 1 or usual:
        chosen = (usual or matches)[0]
        return CardMatch(chosen, tuple(name for name in matches if name != chosen))
    if matches:
        raise ClusterError(f"{shortened(text)} may be {' or '.join(matches)}. Say which one.")
    if cards_of_model:
        raise ClusterError(
            f"{shortened(text)}: the catalogue has this model only as {', '.join(cards_of_model)}. Use one of these "
            "names, or describe the device in a cluster file under devices."
        )
    raise ClusterError(
        f"the catalogue has no card {shortened(text)}; the nearest names are {', '.join(_nearest(words.model))}. Take "
        "one of these if it is the card you mean, or describe yours in a cluster file under devices, for which "
        "ds-hetero cards NAME prints a stub."
    )


def catalogue_name(driver_name: str, memory_bytes: int) -> str | None:
    """Return the catalogue's name of a device; None if the catalogue lacks it.

    Args:
        driver_name: name that PyTorch reports, such as ``NVIDIA A100-SXM4-80GB``.
        memory_bytes: memory that PyTorch reports, which decides between cards of a model if the name has no memory.
    """
    words = _words(driver_name)
    matches = [name for name in _spellings().get(words.model, ()) if _has_form_and_memory(name, words)]

    def mismatch(name: str) -> tuple[float, bool]:
        """Sort key: the difference in memory, and then forms other than SXM (or none) last."""
        return abs(CATALOGUE[name].device.memory_bytes - memory_bytes), _form_of(name) not in (None, "SXM")

    return min(matches, key=mismatch, default=None)


# Forms by the first letter of their spellings: sxm4, hgx and dgx, pcie, nvl.
_FORM_OF_LETTER = {"s": "SXM", "h": "SXM", "d": "SXM", "p": "PCIe", "n": "NVL"}


def _words(text: str) -> _Words:
    """Divide a name into its parts: ``NVIDIA A100-SXM4-80GB`` has model ``nvidiaa100``, form SXM and 80 GiB."""
    lower = text.lower()[:MAX_TEXT]
    memory, form = _MEMORY.search(lower), _FORM.search(lower)
    for pattern in (_MEMORY, _FORM, _IGNORED):
        lower = pattern.sub(" ", lower)
    model = re.sub(r"[^a-z0-9+]", "", lower)
    return _Words(
        model=model,
        form=_FORM_OF_LETTER[form[1][0]] if form else None,
        gib=int(memory[1]) if memory else None,
    )


def _form_of(name: str) -> str | None:
    """Return the form in a catalogue name; None if it has none."""
    return next((form for form in ("SXM", "PCIe", "NVL") if f"-{form}" in name), None)


def _has_form_and_memory(name: str, words: _Words) -> bool:
    """Return True if a catalogue card has the form and the memory that a name gives; a name may give neither."""
    entry = CATALOGUE[name]
    if words.gib is not None and words.gib * GIB != entry.device.memory_bytes:
        return False
    form = _form_of(name) or ("PCIe" if entry.link_name.startswith("PCIe") else None)
    return words.form is None or words.form == form


@cache
def _spellings() -> dict[str, tuple[str, ...]]:
    """Return the names of cards by every spelling of their model: ``4090``, ``rtx4090``, ``nvidiageforcertx4090``."""
    cards: dict[str, list[str]] = {}
    for name, entry in CATALOGUE.items():
        if name in _MODELS:
            models, brands = _MODELS[name]
        elif name.startswith("RTX-"):
            models, brands = (name[4:].lower(),), _GEFORCE
        else:
            models, brands = (name.split("-")[0].lower(),), _INSTINCT if entry.platform == "rocm" else _TESLA
        makers = {"", _MAKER[entry.platform]}
        for maker, brand, model in product(makers, brands, models):
            cards.setdefault(maker + brand + model, []).append(name)
    return {spelling: tuple(names) for spelling, names in cards.items()}


def _nearest(model: str) -> list[str]:
    """Return the names of three cards, of the three models whose spellings are the most similar."""
    similarity_by_name: dict[str, float] = {}
    for spelling, names in _spellings().items():
        similarity = _similarity(model, spelling)
        similarity_by_name[names[0]] = max(similarity_by_name.get(names[0], 0.0), similarity)
    return sorted(similarity_by_name, key=lambda name: -similarity_by_name[name])[:3]


def _similarity(model: str, spelling: str) -> float:
    """Return the similarity of two spellings, 0 to 1; at least 0.9 if ``model`` is a beginning: people omit ends."""
    ratio = SequenceMatcher(None, model, spelling, autojunk=False).ratio()
    is_beginning = bool(model) and spelling.startswith(model)
    return max(ratio, 0.9) if is_beginning else ratio
