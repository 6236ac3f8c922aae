"""Clusters: devices, nodes and links, from the catalogue, a file or a profile. Imports neither torch nor DeepSpeed."""

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.file_values import cluster_to_dict
from ds_hetero.cluster.files import cluster_from_dict, cluster_names, load_cluster
from ds_hetero.cluster.topology import Cluster, DeviceSpec, Efficiency, Link, Node

__all__ = [
    "CATALOGUE",
    "Cluster",
    "DeviceSpec",
    "Efficiency",
    "Link",
    "Node",
    "cluster_from_dict",
    "cluster_names",
    "cluster_to_dict",
    "load_cluster",
]
