"""Clusters: devices, nodes and links, from the catalogue, a file or a profile. Imports neither torch nor DeepSpeed."""

from ds_hetero.cluster.device import DeviceSpec, Efficiency
from ds_hetero.cluster.topology import Cluster, Link, Node

__all__ = ["Cluster", "DeviceSpec", "Efficiency", "Link", "Node"]
