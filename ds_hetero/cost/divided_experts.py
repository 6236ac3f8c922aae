"""Times of experts that are divided among the ranks of a replica, in one layer: messages and computation.

Every layer's forward has three all-to-alls over all ranks: the numbers of rows, the rows, and the results. The backward
has the last two the other way round. A row is a token for one of its experts. The messages and the slowest rank's
experts follow each other, since each of them needs all of the one before:

    | rest of the layer |  rows  | experts of the slowest rank | results |

How many rows an expert gets depends on the data. Here every expert gets equally many, which is the expectation if the
router prefers none, and what auxiliary losses of routers train for. So a rank's experts compute the same number of rows
however tokens are shared; only messages depend on the tokens' shares:

    two ranks with 3/4 and 1/4 of the experts, which hold 100 and 300 tokens of one expert each
    rank 0 sends 100 x 1/4 = 25 rows, receives 300 x 3/4 = 225, and computes 400 x 3/4 = 300

Dimension key: P passes (forward, backward), B assignments, D ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.passes import BlockPasses
from ds_hetero.cost.terms.exchange import exchange_s
from ds_hetero.cost.terms.expert_shares import share_of_experts_D
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

_FORWARD_MESSAGES, _BACKWARD_MESSAGES = 3, 2  # all-to-alls, of `ds_hetero.runtime.experts.layer`
# Elements that kernels read and write for each element of a rank's own rows, counted in `run_placed_experts`: forward
# rows are selected (2), put back into order (2), multiplied by the router's weights (2) and added up (1); the backward
# of the sum and the product writes and reads 4, that of both selections 3 each.
_FORWARD_ELEMENTS, _BACKWARD_ELEMENTS = 7, 10


class ExpertTimes(NamedTuple):
    """Seconds of the divided experts of one layer, forward and backward."""

    exchange_PB: Floats  # all messages, and the kernels that sort and add up rows
    compute_PD: Floats  # experts of every rank

    @property
    def total_PB(self) -> Floats:
        """Time that they add to a layer: messages, and the slowest rank's experts."""
        return np.asarray(self.exchange_PB + self.compute_PD.max(axis=1)[:, None])


class DividedExpertTimes:
    """Times of divided experts for one cluster, model and workload.

    Args:
        whole: passes of a layer whose experts are computed where the tokens are.
        rest: the same without experts. The difference is what the experts of a token take on a rank.
    """

    def __init__(
        self, cluster: Cluster, model: ModelSpec, workload: Workload, whole: BlockPasses, rest: BlockPasses
    ) -> None:
        self._all_ranks = Grouping(cluster, [range(cluster.num_ranks)])
        self.share_D = share_D = share_of_experts_D(model, workload, cluster)
        # Dense layers have neither messages nor experts; a block is the mean of all layers.
        self._layers_share = (model.num_mlps - model.dense_layers) / model.num_layers
        row_bytes = model.hidden_size * workload.element_bytes
        self._token_bytes = workload.micro_batch * model.experts_per_token * row_bytes
        self._memory_s_per_byte = rest.rates.copy_s_per_byte
        compute = []
        for of_whole, of_rest in zip(whole.passes, rest.passes, strict=True):
            token_s_D = of_whole.token_s - of_rest.token_s
            fixed_s_D = of_whole.fixed_s - of_rest.fixed_s
            compute.append(token_s_D * workload.seq_len * share_D + fixed_s_D * (share_D > 0))
        self.compute_PD = np.array(compute)
        # A recomputation that keeps attention still exchanges rows again; its time is part of the backward's pass.
        self._recomputes_inside = workload.keeps_attention

    @property
    def least_P(self) -> Floats:
        """Time that experts add to a layer at least: their computation, with free messages."""
        return np.asarray(self.compute_PD.max(axis=1))

    def times(self, tokens_BD: Floats) -> ExpertTimes:
        """Return the times of experts for tokens of every rank."""
        grouping, tokens_BD = self._all_ranks, np.asarray(tokens_BD, dtype=np.float64)
        bytes_BD = np.broadcast_to(self._token_bytes * self.share_D, tokens_BD.shape)
        transfer_B = exchange_s(grouping, tokens_BD, bytes_BD)[:, 0]
        latency_s = float(grouping.exchange_latency_s[0]) if len(self.share_D) > 1 else 0.0
        own_rows_s_B = (tokens_BD * self._token_bytes * self._memory_s_per_byte).max(axis=1)
        exchange = [
            2 * transfer_B + messages * latency_s + elements * own_rows_s_B
            for messages, elements in (
                (_FORWARD_MESSAGES, _FORWARD_ELEMENTS),
                (_BACKWARD_MESSAGES, _BACKWARD_ELEMENTS),
            )
        ]
        if self._recomputes_inside:
            exchange[1] = exchange[1] + exchange[0]
        return ExpertTimes(self._layers_share * np.array(exchange), self.compute_PD)

    def largest_sender(self, tokens_D: Floats) -> int:
        """Return the rank that sends or receives the most rows."""
        sent_D = tokens_D * (1 - self.share_D)
        received_D = (tokens_D.sum() - tokens_D) * self.share_D
        return int(np.maximum(sent_D, received_D).argmax())
