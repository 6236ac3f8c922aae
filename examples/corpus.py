"""The sources of Python's standard library as long sequences of tokens: real text that every machine has.

    data = corpus.long_files(min_tokens=8192, max_tokens=10240, count=5)

A byte-pair tokenizer is trained on the sources on the spot, which takes seconds; it and the tokens are kept in .cache/.
`examples/pretrain` makes documents of the same sources.
"""

from __future__ import annotations

import fcntl
import platform
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "corpus"


def long_files(*, min_tokens: int, max_tokens: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Return ``count`` samples, each a whole file of ``min_tokens`` to ``max_tokens``.

    Lengths differ and divide by nothing. The list is a map-style data set, as DataLoader and the HF Trainer take it.
    """
    ids = [file for file in _tokenized()["files"] if min_tokens <= len(file) <= max_tokens]
    if len(ids) < count:
        raise ValueError(f"there are {len(ids)} files of {min_tokens} to {max_tokens} tokens, fewer than {count}.")
    return [{"input_ids": file.long(), "labels": file.long()} for file in ids[:count]]


def tokenizer() -> Tokenizer:
    """Return the tokenizer, to turn ids back into text."""
    return Tokenizer.from_str(_tokenized()["tokenizer"])


def sources() -> list[Path]:
    """Return the files of the standard library, without its tests, in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    return sorted(path for path in library.rglob("*.py") if left_out.isdisjoint(path.relative_to(library).parts))


def read_source(path: Path) -> str:
    """Return the text of a file, with bytes that are not UTF-8 replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def byte_pairs(texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-pair tokenizer on ``texts``; the special tokens have the first ids."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def made_once(name: str, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns, from a file of the cache if there is one.

    The first process makes it, other processes that ask at the same time wait for it.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    cached = CACHE / f"python{platform.python_version()}-{name}.pt"
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cached.exists():
            unfinished = cached.with_suffix(".unfinished")
            torch.save(make(), unfinished)
            unfinished.rename(cached)
    return torch.load(cached)


def _tokenized() -> dict[str, Any]:
    return made_once(f"files-{VOCAB_SIZE}", _tokenize)


def _tokenize() -> dict[str, Any]:
    """The tokenizer as JSON, and the tokens of every file, int32."""
    texts = [read_source(path) for path in sources()]
    bpe = byte_pairs(texts[::4], VOCAB_SIZE)
    files = [torch.tensor(encoding.ids, dtype=torch.int32) for encoding in bpe.encode_batch(texts)]
    return {"tokenizer": bpe.to_str(), "files": files}
