"""A tiny Llama, its tokenizer and a few chats, which every framework trains on; all are made here.

    python -m tests.beside.inputs FOLDER       # in the environment of a framework, so that its transformers reads them

The model learns to sort numbers. Prompts and answers have unlike lengths, so that batches are padded.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

MODEL, DATA = "model", "sort.jsonl"
NUM_ROWS = 64
NUM_HEADS, NUM_KV_HEADS = 4, 2
_VOCAB = 320


def write_inputs(folder: Path) -> None:
    """Write the model with its tokenizer, and the dataset in Alpaca's format, which all three frameworks read."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = _rows()
    (folder / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
    # LLaMA-Factory looks its datasets up in this file.
    (folder / "dataset_info.json").write_text(json.dumps({"sort": {"file_name": DATA}}))
    tokenizer = _tokenizer([" ".join(row.values()) for row in rows])
    tokenizer.save_pretrained(folder / MODEL)
    _model(tokenizer).save_pretrained(folder / MODEL)


def _rows() -> list[dict[str, str]]:
    generator = random.Random(0)
    rows = []
    for _ in range(NUM_ROWS):
        numbers = generator.sample(range(100), generator.randint(3, 12))
        rows.append(
            {
                "instruction": "Sort the numbers.",
                "input": " ".join(map(str, numbers)),
                "output": " ".join(map(str, sorted(numbers))),
            }
        )
    return rows


def _tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    pairs = Tokenizer(models.BPE(unk_token=special[0]))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCAB, special_tokens=special, initial_alphabet=alphabet)
    pairs.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=pairs, unk_token=special[0], bos_token=special[1], eos_token=special[2], pad_token=special[3]
    )


def _model(tokenizer: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_KV_HEADS,
            max_position_embeddings=1024,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]))
