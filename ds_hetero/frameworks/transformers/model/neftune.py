"""NEFTune on a shard: embeddings get noise of the size that they would get in the whole sequence.

NEFTune (arXiv:2310.05914) adds noise uniform in +- alpha / sqrt(L D) to embeddings [B, L, D] while a model trains. Its
hooks, transformers' and those that follow it, take L from the embeddings that they see and alpha from an attribute of
the embedding module. On a shard of s tokens, alpha sqrt(s / L) makes it the noise of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ds_hetero.errors import ConfigError

_ALPHA = "neftune_noise_alpha"


def scale_noise(embeddings: nn.Module | None, tokens: int, length: int) -> Callable[[], None]:
    """Let a forward on a shard add the noise of the whole sequence; return the call that puts the amplitude back.

    Args:
        embeddings: the model's input embeddings; without NEFTune nothing happens.
        tokens: s, what the embeddings will see; at least 1.
        length: L, of the whole sequence.
    """
    alpha = getattr(embeddings, _ALPHA, None)
    if embeddings is None or not alpha:
        return _do_nothing
    setattr(embeddings, _ALPHA, alpha * (tokens / length) ** 0.5)
    return lambda: setattr(embeddings, _ALPHA, alpha)


def expect_no_noise(embeddings: nn.Module | None) -> None:
    """Refuse NEFTune, whose noise depends on a row's length, where rows become one stream. Raises `ConfigError`."""
    if getattr(embeddings, _ALPHA, None):
        raise ConfigError(
            f'{_ALPHA} and "placement": "documents" do not go together: noise is sized by the length of a padded row, '
            'and rows are put behind each other. Use "placement": "stream", or no noise.'
        )


def _do_nothing() -> None:
    pass
