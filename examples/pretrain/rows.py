"""Documents packed into rows of equal length, and the order in which an epoch reads them.

    rows = packed_rows(documents.training, row_tokens=2048, seed=0)
    loader = DataLoader(rows, batch_size=1, sampler=EpochOrder(len(rows), seed=0))

A row holds several documents; ``position_ids`` restart at each, so that no token attends to another document. Rows and
order depend on the seed alone: every rank makes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

IGNORED = -100  # as a label: transformers and torch's cross entropy leave it out


def packed_rows(documents: Sequence[torch.Tensor], row_tokens: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Lay shuffled documents end to end and cut them into rows; what does not fill the last row is left out.

        documents   [length] each, as many as there are
        input_ids, labels, position_ids of a row   [row_tokens], int64

    A document that the end of a row cuts goes on in the next row as a document of its own. The first token of a
    document is not predicted. The list is a map-style data set, as DataLoader and the HF Trainer take it. Raises
    `ValueError`: the documents do not fill a row.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(documents), generator=generator).tolist()
    tokens = torch.cat([documents[index] for index in order]).long()
    if len(tokens) < row_tokens:
        raise ValueError(f"{len(documents)} documents have {len(tokens)} tokens, fewer than a row of {row_tokens}.")

    begins_document = torch.zeros(len(tokens), dtype=torch.bool)
    lengths = torch.tensor([len(documents[index]) for index in order])
    begins_document[lengths.cumsum(0) - lengths] = True
    begins_document[::row_tokens] = True

    # Position of a token: its index less that of the latest beginning, in [..., begin, ., ., begin, .] 0 1 2 0 1.
    index = torch.arange(len(tokens))
    latest_begin = torch.where(begins_document, index, 0).cummax(0).values
    positions = index - latest_begin
    labels = tokens.masked_fill(begins_document, IGNORED)

    num_rows = len(tokens) // row_tokens
    rows = []
    for row in range(num_rows):
        here = slice(row * row_tokens, (row + 1) * row_tokens)
        rows.append({"input_ids": tokens[here], "labels": labels[here], "position_ids": positions[here]})
    return rows


class EpochOrder(Sampler[int]):
    """Every row once an epoch, in an order that depends on the seed and the epoch.

    Loops call ``set_epoch`` before an epoch, as for torch's DistributedSampler.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that is read next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # as torch's DistributedSampler
        return iter(torch.randperm(self.num_rows, generator=generator).tolist())

    def __len__(self) -> int:
        return self.num_rows
