"""Prices of a cluster's devices, read from one line such as ``5090=0.5,3090=0.2``: money for an hour of one device."""

from __future__ import annotations

from dataclasses import replace

from ds_hetero.cluster.file_values import DEVICE_KEYS, read_number
from ds_hetero.cluster.names import card_named
from ds_hetero.cluster.topology import Cluster, DeviceSpec
from ds_hetero.common.reading import shortened
from ds_hetero.common.text import listed
from ds_hetero.errors import ClusterError


def read_prices(text: str, cluster: Cluster) -> dict[str, float]:
    """Return the price of an hour by device name.

    Args:
        text: value of ``--price``, such as ``5090=0.5,3090=0.2``.
        cluster: cluster whose devices may be named.

    Raises:
        ClusterError: a part has no price, the cluster has no device of this name, or a device is named twice.
    """
    names = tuple(dict.fromkeys(device.name for device in cluster.devices))
    prices: dict[str, float] = {}
    for part in text.split(","):
        card, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            price = float(value)
        except ValueError:
            price = None
        if not equals or price is None:
            raise ClusterError(
                "--price must list cards with the price of an hour of one card, such as 5090=0.5,3090=0.2; got "
                f"{shortened(part)}."
            )
        name = _device_named(card, names)
        if name in prices:
            raise ClusterError(f"--price names {name} twice. Give one price for a card.")
        prices[name] = read_number(f"--price {name}", price, DEVICE_KEYS["price_per_hour"][2])
    return prices


def _device_named(card: str, names: tuple[str, ...]) -> str:
    """Return the device name that ``card`` stands for.

    Raises:
        ClusterError: ``card`` is none of ``names``, or it may be several of them, and the card that this name usually
            means is not among them.
    """
    if card in names:
        return card
    match = card_named(card)
    matches = [name for name in (match.name, *match.alternatives) if name in names]
    if len(matches) > 1 and match.name not in names:
        raise ClusterError(f"--price: {shortened(card)} matches several devices: {listed(matches)}. Name one of them.")
    if not matches:
        raise ClusterError(
            f"--price: {shortened(card)} is not a device of the cluster, which has {listed(names)}. Name one of them."
        )
    return matches[0]


def with_prices(cluster: Cluster, prices: dict[str, float]) -> Cluster:
    """Return the cluster with these prices of an hour by device name; other devices keep theirs."""

    def with_price(device: DeviceSpec) -> DeviceSpec:
        return replace(device, price_per_hour=prices.get(device.name, device.price_per_hour))

    return cluster.with_devices(with_price)
