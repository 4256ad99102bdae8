"""Decoding: with and without cache, beams, batches, order."""

from __future__ import annotations

import pytest
import torch

from lockstep.config.schema import ModelOptions
from lockstep.corpus.tokenizer import BEGIN, END, PAD, Tokenizer
from lockstep.generation.beam_search import (
    batches_by_length,
    beam_search,
    max_lengths,
    pad_rows,
    translate,
)
from lockstep.models.translator import Translator, init_param
from lockstep.parallel.deferred_init import materialize

VOCABULARY = 60


@pytest.fixture(scope="module")
def model() -> Translator:
    """A model trained to reverse its input, with END: its translations have many lengths."""
    torch.manual_seed(3)
    net = Translator(VOCABULARY, ModelOptions(32, 4, 1, 2, 64, dropout=0.0, attention="plain"))
    materialize(net, torch.device("cpu"), lambda name, shape: init_param(name, shape, 5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    for _ in range(60):
        sentences = [
            torch.randint(4, VOCABULARY, (int(n),)).tolist() for n in torch.randint(1, 9, (64,))
        ]
        labels = pad_rows([s[::-1] for s in sentences], torch.device("cpu"))
        target = torch.cat(
            (torch.full((64, 1), BEGIN), labels[:, :-1].where(labels[:, :-1] != END, PAD)), dim=1
        )
        loss = net(pad_rows(sentences, torch.device("cpu")), target, labels) / (labels != PAD).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def sentences(count: int, seed: int, longest: int = 14) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def uncached(model: Translator, source: torch.Tensor, max_tokens: int) -> list[list[int]]:
    """Greedy decoding without a cache, one sentence at a time."""
    translations = []
    for row, limit in zip(source, max_lengths(source, max_tokens).tolist(), strict=True):
        ids = [BEGIN]
        while len(ids) <= limit:
            token = int(model(row[None], torch.tensor([ids]))[0, -1].argmax())
            if token == END:
                break
            ids.append(token)
        translations.append(ids[1:])
    return translations


def score(model: Translator, source: list[int], ids: list[int]) -> float:
    """Normalized log-probability of a finished translation."""
    log_p = model(
        pad_rows([source], torch.device("cpu")), torch.tensor([[BEGIN, *ids]])
    ).log_softmax(-1)[0]
    labels = torch.tensor([*ids, END])
    return float(log_p.gather(1, labels[:, None]).sum()) / len(labels)


@torch.inference_mode()
def test_cached_greedy_decoding_is_the_uncached_argmax(model: Translator) -> None:
    source = pad_rows(sentences(64, seed=1), torch.device("cpu"))
    translations = beam_search(model, source, beams=1, max_tokens=44)
    assert translations == uncached(model, source, 44)
    assert len(set(map(len, translations))) > 4, (
        "the test is worth little when all translations are equally long"
    )


@torch.inference_mode()
def test_a_growing_cache_gives_the_same_logits_as_a_large_one(model: Translator) -> None:
    """With END forbidden, decoding runs far beyond the first capacity."""
    source = pad_rows(sentences(3, seed=2), torch.device("cpu"))
    tokens = torch.full((3, 1), BEGIN)
    small, large = (model.new_cache(model.encode(source), beams=1, capacity=c) for c in (4, 64))
    for position in range(40):
        if position == small.capacity:
            small.grow()
        logits, expected = model.step(tokens, small), model.step(tokens, large)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        logits[..., END] = -torch.inf
        tokens = logits.argmax(-1)


@torch.inference_mode()
def test_beam_search_is_at_least_as_probable_as_greedy(model: Translator) -> None:
    """On average, and for nearly every sentence: a beam may drop the greedy path half-way."""
    rows = sentences(40, seed=4, longest=9)
    source = pad_rows(rows, torch.device("cpu"))
    searches = (
        beam_search(model, source, beams=1),
        beam_search(model, source, beams=5),
    )
    translations = list(zip(*searches, strict=True))
    gains = [
        score(model, row, beam) - score(model, row, greedy)
        for row, (greedy, beam) in zip(rows, translations, strict=True)
    ]
    assert sum(gains) > 0.1, "a wider search improves some sentences"
    assert sum(gain < -1e-4 for gain in gains) <= 2


@torch.inference_mode()
def test_each_beam_attends_to_its_past(model: Translator) -> None:
    """A beam's probability equals that of its words computed without a cache."""
    rows = sentences(6, seed=5, longest=8)
    source = pad_rows(rows, torch.device("cpu"))
    cache = model.new_cache(model.encode(source), beams=3, capacity=16)
    tokens, written = torch.full((6, 3), BEGIN), torch.full((6, 3, 1), BEGIN)
    generator = torch.Generator().manual_seed(0)
    for _ in range(7):
        logits = model.step(tokens, cache)
        for k in range(3):
            torch.testing.assert_close(
                logits[:, k], model(source, written[:, k])[:, -1], rtol=1e-4, atol=1e-4
            )
        parents = torch.randint(0, 3, (6, 3), generator=generator)
        tokens = torch.randint(4, VOCABULARY, (6, 3), generator=generator)
        cache.reorder(parents)
        written = torch.cat(
            (written.gather(1, parents[..., None].expand_as(written)), tokens[..., None]), dim=-1
        )


@pytest.mark.parametrize("beams", [1, 4])
def test_a_translation_does_not_depend_on_its_batch(model: Translator, beams: int) -> None:
    rows = sentences(21, seed=6)
    together = pad_rows(rows, torch.device("cpu"))
    translations = beam_search(model, together, beams=beams)
    for row, ids in zip(rows, translations, strict=True):
        alone = pad_rows([row], torch.device("cpu"))
        assert beam_search(model, alone, beams=beams) == [ids]


def test_batches_contain_every_row_once_within_the_budget() -> None:
    lengths = [3, 9, 1, 4, 4, 30, 2, 9]
    batches = batches_by_length(lengths, tokens=18)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert batches[0] == [5], "a row longer than the budget goes alone"
    assert batches[1] == [1, 7], "equal lengths keep their order"
    assert all(len(batch) * max(lengths[i] for i in batch) <= 18 for batch in batches[1:])


def test_translations_are_in_the_order_of_the_texts_and_empty_texts_stay_empty(
    model: Translator,
) -> None:
    words = [f"w{i}" for i in range(80)]
    tokenizer = Tokenizer.train(
        [" ".join(words)] * 2, kind="word", vocab_size=VOCABULARY, min_frequency=1, lowercase=False
    )
    assert tokenizer.vocab_size == VOCABULARY
    known = tokenizer.decode([[i] for i in range(4, VOCABULARY)])
    texts = [" ".join(known[i : i + n]) for i, n in enumerate((3, 1, 6, 2, 5, 1, 4))]
    texts.insert(2, "")
    translations = translate(model, tokenizer, texts, batch_tokens=12)
    assert translations[2] == ""
    assert translations == [translate(model, tokenizer, [text])[0] for text in texts]
    assert len(set(translations)) > 5, "the test is worth little when all translations are alike"
