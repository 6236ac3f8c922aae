"""Embedding, head, loss and measures with words cut over ranks, against one process with all words."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.loss import cross_entropy_sum, measure_tokens
from ds_hetero.runtime.vocabulary import VocabularyPart, embed_part, project_to_part
from tests.support import run_ranks

ROWS, LENGTH, WIDTH = 2, 5, 6


def whole_model(words, dtype):
    """Table, head with a bias, words of a batch, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(words)
    table, head = torch.randn(2, words, WIDTH, generator=generator, dtype=dtype)
    bias = torch.randn(words, generator=generator, dtype=dtype)
    batch = torch.randint(0, words, (ROWS, LENGTH), generator=generator)
    labels = batch.roll(-1, 1)
    labels[:, -1] = IGNORE_INDEX
    return [nn.Parameter(x) for x in (table, head, bias)], batch, labels


def results(parameters, batch, labels, part, chunk_tokens):
    table, head, bias = parameters

    def look_up(rows):
        return nn.functional.embedding(rows, table)

    def project(x):
        return nn.functional.linear(x, head, bias) * 3

    x = look_up(batch) if part is None else embed_part(look_up, batch, part)
    x.retain_grad()
    logits = project(x.tanh()) if part is None else project_to_part(project, x.tanh(), part)
    loss = cross_entropy_sum(logits, labels, chunk_tokens, part)
    loss.backward()
    return loss.detach(), measure_tokens(logits, labels, part), x.grad, [p.grad for p in parameters]


def equals_one_process(rank, words, chunk_tokens, dtype, tolerance):
    parameters, batch, labels = whole_model(words, dtype)
    part = VocabularyPart.of(dist.group.WORLD, words)
    own = [nn.Parameter(p.detach()[part.start : part.stop].clone()) for p in parameters]
    loss, measures, given, gradients = results(own, batch, labels, part, chunk_tokens)
    wanted_loss, wanted_measures, wanted_given, wanted = results(parameters, batch, labels, None, chunk_tokens)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss, wanted_loss, **close)
    torch.testing.assert_close(measures, wanted_measures, rtol=1e-6, atol=1e-6)  # fp32
    torch.testing.assert_close(given, wanted_given, **close)
    for gradient, of_all in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, of_all[part.start : part.stop], **close)
    return part.stop - part.start


@pytest.mark.parametrize(("words", "sizes"), [(12, [4, 4, 4]), (11, [4, 4, 3]), (7, [3, 3, 1])])
@pytest.mark.parametrize("chunk_tokens", [1024, 3])
def test_cut_words_give_the_loss_and_gradients_of_one_process(words, sizes, chunk_tokens):
    assert run_ranks(equals_one_process, 3, words, chunk_tokens, torch.float64, 1e-12) == sizes


def test_cut_words_in_bf16():
    """The tolerance is three units of bf16, whose products are added up in another order."""
    assert run_ranks(equals_one_process, 2, 11, 1024, torch.bfloat16, 2**-6) == [6, 5]


def guesses_the_first(rank):
    """Words of equal logits on both ranks: the first is the guess, as argmax has it on one rank."""
    logits = torch.zeros(1, 4, 6)
    labels = torch.tensor([[0, 3, 5, IGNORE_INDEX]])
    part = VocabularyPart.of(dist.group.WORLD, 6)
    return measure_tokens(logits[..., part.start : part.stop], labels, part).tolist()[::2]


def test_of_equal_logits_the_first_word_is_the_guess():
    assert run_ranks(guesses_the_first, 2) == [[3.0, 1.0]] * 2


def looks_up_another_word(rank, of_labels):
    parameters, batch, labels = whole_model(6, torch.float64)
    (labels if of_labels else batch)[0, 1] = 6
    part = VocabularyPart.of(dist.group.WORLD, 6)
    own = [nn.Parameter(p.detach()[part.start : part.stop].clone()) for p in parameters]
    try:
        results(own, batch, labels, part, 1024)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("of_labels", [False, True], ids=["as an input", "as a label"])
def test_a_word_that_no_rank_has_is_an_error(of_labels):
    assert all("the model has 6 words" in text for text in run_ranks(looks_up_another_word, 2, of_labels))
