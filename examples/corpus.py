"""The sources of Python's standard library as long sequences of tokens: real text that every machine has.

    data = corpus.long_files(min_tokens=8192, max_tokens=10240, count=5)

A byte-pair tokenizer is trained on the sources on the spot, which takes seconds; it and the tokens are kept in .cache/.
"""

from __future__ import annotations

import fcntl
import platform
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "corpus"


def long_files(*, min_tokens: int, max_tokens: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Return ``count`` samples, each a whole file of ``min_tokens`` to ``max_tokens``.

    Lengths differ and divide by nothing. The list is a map-style data set, as DataLoader and the HF Trainer take it.
    """
    ids = [file for file in _tokens() if min_tokens <= len(file) <= max_tokens]
    if len(ids) < count:
        raise ValueError(f"there are {len(ids)} files of {min_tokens} to {max_tokens} tokens, fewer than {count}.")
    return [{"input_ids": file.long(), "labels": file.long()} for file in ids[:count]]


def tokenizer() -> Tokenizer:
    """Return the tokenizer, to turn ids back into text."""
    _tokens()
    return Tokenizer.from_file(str(_cached("tokenizer.json")))


def _tokens() -> list[torch.Tensor]:
    """Return all files in the order of their names, int32; the first process makes them, the others wait for it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _cached("tokens.pt").exists():
            _make()
    return torch.load(_cached("tokens.pt"))


def _cached(name: str) -> Path:
    return CACHE / f"python{platform.python_version()}-{VOCAB_SIZE}-{name}"


def _make() -> None:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in _sources()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts[::4], trainer)
    bpe.save(str(_cached("tokenizer.json")))
    files = [torch.tensor(encoding.ids, dtype=torch.int32) for encoding in bpe.encode_batch(texts)]
    unfinished = _cached("unfinished")
    torch.save(files, unfinished)
    unfinished.rename(_cached("tokens.pt"))


def _sources() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    return sorted(path for path in library.rglob("*.py") if left_out.isdisjoint(path.relative_to(library).parts))
