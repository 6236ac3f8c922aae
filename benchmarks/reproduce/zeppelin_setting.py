"""A model on one of Zeppelin's clusters: a rank's cost of a token, a pair of tokens and a transfer."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.reproduce.zeppelin_paper import FITTED, MACHINES, MODELS
from ds_hetero.cost.terms.flops import ATTENTION_FORWARD_FLOPS, matmul_flops

GPUS_PER_NODE = 8
ELEMENT_BYTES = 2  # of bf16
BACKWARD_COMPUTE, BACKWARD_WIRE = 2.5, 2.0  # of attention, over the forward


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model on a cluster of the paper.

    Args:
        model: of `MODELS`.
        machine: of `MACHINES`.
        tensor_parallel: GPUs of a rank.
        gpus: in all.
        matmul_share: achieved fraction of the peak.
        attention_share: the same of attention.
        routed_nics: bandwidth of routing over all NICs, in NICs, with dispatch and combine; None for all NICs of a node
            and separate times of dispatch and combine.
        remap_s: forward remapping of `TOKENS_PER_GPU` tokens.
    """

    model: str
    machine: str
    tensor_parallel: int
    gpus: int
    matmul_share: float = 0.565
    attention_share: float = 0.60
    routed_nics: float | None = None
    remap_s: float = 0.0

    @classmethod
    def fitted(cls, model: str, machine: str, tensor_parallel: int, gpus: int) -> Setting:
        """Return the setting with the constants of the paper's traces."""
        constants = {name: value for name, (value, _) in FITTED.items()}
        return cls(model=model, machine=machine, tensor_parallel=tensor_parallel, gpus=gpus, **constants)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.gpus // self.tensor_parallel

    @property
    def ranks_of_node(self) -> int:
        """Ranks of a node; all ranks if they are fewer than a node has."""
        return min(GPUS_PER_NODE // self.tensor_parallel, self.ranks)

    @property
    def units_by_node(self) -> list[list[int]]:
        """Number of ranks of every node."""
        per_node = self.ranks_of_node
        return [list(range(first, first + per_node)) for first in range(0, self.ranks, per_node)]

    @property
    def linear_s(self) -> float:
        """Forward seconds of the linear modules, per token; of experts, those that the token uses."""
        return matmul_flops(MODELS[self.model]) / (self._rank_flops_per_s * self.matmul_share)

    @property
    def experts_wire_s(self) -> float:
        """Seconds in which a token travels to its experts and back, in the forward as in the backward; 0 without any.

        The ranks of a node hold equal numbers of experts, and all experts get equally many tokens. So of the rows of a
        token, one for each expert that it uses, all but 1 / ranks leave their rank.
        """
        model = MODELS[self.model]
        row_bytes = ELEMENT_BYTES * model.hidden_size
        leaving = model.experts_per_token * (1 - 1 / self.ranks_of_node)
        return 2 * leaving * row_bytes / self.link_bytes_per_s

    @property
    def token_s(self) -> float:
        """Seconds of one token outside attention, forward and backward: linear modules, and the way to its experts."""
        return 3 * self.linear_s + 2 * self.experts_wire_s

    @property
    def pair_s(self) -> float:
        """Forward seconds of attention, per query and key."""
        flops = ATTENTION_FORWARD_FLOPS * MODELS[self.model].hidden_size
        return flops / (self._rank_flops_per_s * self.attention_share)

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values of one token."""
        return 2 * ELEMENT_BYTES * MODELS[self.model].hidden_size

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth of one rank inside a node."""
        return MACHINES[self.machine]["link_bytes_per_s"] * self.tensor_parallel

    @property
    def own_bytes_per_s(self) -> float:
        """Bandwidth of one rank between nodes, through its nearest NICs."""
        of_rank = max(MACHINES[self.machine]["nics"] * self.tensor_parallel // GPUS_PER_NODE, 1)
        return MACHINES[self.machine]["nic_bytes_per_s"] * min(self.tensor_parallel, of_rank)

    @property
    def node_bytes_per_s(self) -> float:
        """Bandwidth between nodes of all NICs of a node together, as routing uses them."""
        machine = MACHINES[self.machine]
        return max(machine["nic_bytes_per_s"] * (self.routed_nics or machine["nics"]), self.own_bytes_per_s)

    @property
    def _rank_flops_per_s(self) -> float:
        return MACHINES[self.machine]["flops_per_s"] * self.tensor_parallel

    def wire_s(self, tokens: float, *, crosses: bool, routed: bool) -> float:
        """Return the seconds to send keys and values of ``tokens`` tokens; with routing by the paper's Eq. 1."""
        data = tokens * self.kv_bytes
        if not crosses:
            return data / self.link_bytes_per_s
        direct_s = data / self.own_bytes_per_s
        if not routed:
            return direct_s
        hops_s = 0.0 if self.routed_nics else 2 * data / self.link_bytes_per_s
        return min(data / self.node_bytes_per_s + hops_s, direct_s)
