"""Keys of the section that are still read, and the keys that replace them; docs/stability.md has the policy."""

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.values.section import SECTION, HeterogeneitySection


class DeprecatedKey(NamedTuple):
    """A key that a later release will not read."""

    name: str
    replacement: str  # as it is written in ds_config.json
    since: str  # release that deprecated it
    gone_in: str  # first release that does not read it


DEPRECATED_KEYS = (DeprecatedKey("verify", '"checks": {"compare_every": ...}', "0.3.0", "0.5.0"),)


def deprecation_lines(section: HeterogeneitySection) -> list[str]:
    """Return a line for each deprecated key that the section contains."""
    return [
        f'"{SECTION}.{key.name}" is deprecated since {key.since} and is not read from {key.gone_in} on. '
        f"Write {key.replacement} instead."
        for key in DEPRECATED_KEYS
        if key.name in section.model_fields_set
    ]
