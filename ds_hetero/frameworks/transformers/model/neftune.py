"""NEFTune on a shard: embeddings get noise of the same size as in the whole sequence.

NEFTune (arXiv:2310.05914) adds noise, uniform between -a and a with a = alpha / sqrt(L D), to the embeddings [B, L, D]
of a model in training. The hook of transformers takes L from the embeddings that it gets, and alpha from an attribute
of the embedding module. On a shard of s tokens it takes s for L. So alpha is set to alpha * sqrt(s / L) for the time of
a forward, which gives the noise of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ds_hetero.errors import ConfigError

_ALPHA = "neftune_noise_alpha"


def scale_noise(embeddings: nn.Module | None, tokens: int, length: int) -> Callable[[], None]:
    """Let a forward on a shard add the noise of the whole sequence. Without NEFTune, do nothing.

    Args:
        embeddings: the model's input embeddings.
        tokens: s, tokens of the shard; at least 1.
        length: L, tokens of the whole sequence.

    Returns:
        A function that restores alpha, to be called after the forward.
    """
    alpha = getattr(embeddings, _ALPHA, None)
    if embeddings is None or not alpha:
        return _do_nothing
    setattr(embeddings, _ALPHA, alpha * (tokens / length) ** 0.5)
    return lambda: setattr(embeddings, _ALPHA, alpha)


def expect_no_noise(embeddings: nn.Module | None) -> None:
    """Refuse NEFTune for batches whose rows are joined to one stream. Raises `ConfigError`.

    Its noise depends on the length of a row, which a joined row no longer has.
    """
    if getattr(embeddings, _ALPHA, None):
        raise ConfigError(
            f'{_ALPHA} and "placement": "documents" do not go together: the size of the noise depends on the length of '
            'a padded row, but this placement joins rows to one. Use "placement": "stream", or no noise.'
        )


def _do_nothing() -> None:
    pass
