"""Functions and classes of Python's standard library as documents: free text that every machine with Python has.

    documents = definitions.documents(vocab_size=4096)
    documents.training, documents.held_out

About 5,600 definitions, 8 MB, under the licence of Python (PSF-2.0). Those of Python 3.11 are 2.1 million tokens with a
vocabulary of 4,096, and 2.7 million with 1,024. A document begins with the token 0 and ends with the token 1. Every
25th file is held out for evaluation, whole. The byte-pair tokenizer is trained on the other files, in ten to thirty
seconds; it and the tokens are kept in .cache/.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of corpus.py

import corpus

SPECIAL_TOKENS = ("<begin>", "<end>")
BEGIN, END = range(2)
HELD_OUT_EVERY = 25  # files


@dataclass(frozen=True)
class Documents:
    """Documents as tokens [length], int32, in the order of their files, and the tokenizer that made them."""

    training: list[torch.Tensor]
    held_out: list[torch.Tensor]
    tokenizer: Tokenizer


def documents(vocab_size: int) -> Documents:
    """Return all documents; the first process that asks makes them, the others wait for it."""
    made = corpus.made_once(f"definitions-{vocab_size}", lambda: _make(vocab_size))
    return Documents(made["training"], made["held_out"], Tokenizer.from_str(made["tokenizer"]))


def _make(vocab_size: int) -> dict[str, Any]:
    training: list[str] = []
    held_out: list[str] = []
    for number, path in enumerate(corpus.sources()):
        part = held_out if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else training
        part += _definitions(corpus.read_source(path))
    bpe = corpus.byte_pairs(training, vocab_size, SPECIAL_TOKENS)
    return {
        "training": _encode(bpe, training),
        "held_out": _encode(bpe, held_out),
        "tokenizer": bpe.to_str(),
    }


def _definitions(source: str) -> list[str]:
    """Text of every function and class at the top level of a file, with its decorators; none of a file for Python 2."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return []
    lines = source.splitlines(keepends=True)
    texts = []
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min(node.lineno for node in (statement, *statement.decorator_list))
            texts.append("".join(lines[first - 1 : statement.end_lineno]))
    return texts


def _encode(bpe: Tokenizer, texts: list[str]) -> list[torch.Tensor]:
    encodings = bpe.encode_batch(texts)
    return [torch.tensor([BEGIN, *encoding.ids, END], dtype=torch.int32) for encoding in encodings]
