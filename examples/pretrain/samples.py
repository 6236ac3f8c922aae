"""Text that a pretrained model writes."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from definitions import BEGIN

PROMPTS = ("def read_", "class ")


def samples(model: PreTrainedModel, tokenizer: Tokenizer, max_new_tokens: int = 120) -> list[str]:
    """Return a continuation of every prompt, drawn at temperature 0.7 with the same draws on every rank."""
    model.eval()
    texts = []
    for prompt in PROMPTS:
        torch.manual_seed(0)
        ids = torch.tensor([[BEGIN, *tokenizer.encode(prompt).ids]], device=model.device)
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
        )
        texts.append(tokenizer.decode(written[0].tolist()))
    return texts
