"""Tokenizers: encoding and decoding; the same vocabulary in every process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.train_tokenizer import fingerprint_of, train_on

from lockstep.corpus import cldr
from lockstep.corpus.tokenizer import (
    BEGIN,
    END,
    MAX_WORD,
    PAD,
    SPECIALS,
    UNKNOWN,
    WORDS_OF_DOCUMENTS,
    Tokenizer,
    truncate_words,
)
from lockstep.errors import DataError

ALL = "[PAD] [BEGIN] [END] [UNKNOWN]"
TEXTS = [
    "Wednesday, July 3, 2024",
    "mercoledì 3 luglio 2024",
    "12.50 US dollars",
    "Straße und 日本",
    f"who writes {ALL} here?",
] * 3

TRAIN_TOKENIZER = Path(__file__).parents[2] / "support" / "train_tokenizer.py"


def train(
    kind: str = "bpe", texts: list[str] = TEXTS, vocabulary: int = 400, lowercase: bool = False
) -> Tokenizer:
    return Tokenizer.train(
        texts, kind=kind, vocab_size=vocabulary, min_frequency=1, lowercase=lowercase
    )  # type: ignore[arg-type]


BPE = train()


def test_special_tokens_have_the_first_four_ids() -> None:
    for kind in ("bpe", "word"):
        tokenizer = train(kind)
        assert (
            [tokenizer._inner.id_to_token(i) for i in (PAD, BEGIN, END, UNKNOWN)]
            == SPECIALS
            == ALL.split()
        )


@given(st.text())
@settings(deadline=None, max_examples=300)
def test_bpe_restores_every_text(text: str) -> None:
    assert BPE.decode(BPE.encode([text])) == [text]


@given(st.lists(st.sampled_from([*SPECIALS, " ", "a", "", "[", "PAD", "]"])))
@settings(deadline=None, max_examples=200)
def test_special_tokens_in_a_text_are_ordinary_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    (ids,) = BPE.encode([text])
    assert not {PAD, BEGIN, END, UNKNOWN} & set(ids)
    assert BPE.decode([ids]) == [text]


def test_special_tokens_in_a_text_are_ordinary_text_after_loading(tmp_path: Path) -> None:
    for kind in ("bpe", "word"):
        train(kind).save(tmp_path / "tokenizer.json")
        (ids,) = Tokenizer.load(tmp_path / "tokenizer.json").encode([ALL])
        assert ids
        assert not {PAD, BEGIN, END, UNKNOWN} & set(ids)


def test_digits_are_single_tokens_and_a_word_has_the_same_token_everywhere() -> None:
    often = train(texts=["July 2024 July", "2024 2024 2024 12 12"] * 50)
    tokens = [often._inner.id_to_token(i) for i in often.encode(["July 2024 July"])[0]]
    assert tokens == ["ĠJuly", "Ġ2", "0", "2", "4", "ĠJuly"]


def test_decoding_drops_special_ids_except_unknown() -> None:
    word = train("word", ["the cat sat"])
    (ids,) = word.encode(["the dog sat"])
    assert ids.count(UNKNOWN) == 1
    assert word.decode([[BEGIN, *ids, END, PAD, PAD]]) == ["the [UNKNOWN] sat"]
    assert BPE.decode([[BEGIN, *BPE.encode(["3 luglio"])[0], END, PAD]]) == ["3 luglio"]


def test_lower_case_is_part_of_the_tokenizer(tmp_path: Path) -> None:
    train(lowercase=True).save(tmp_path / "tokenizer.json")
    lower = Tokenizer.load(tmp_path / "tokenizer.json")
    assert lower.decode(lower.encode(["JULY È"])) == ["july è"]
    assert fingerprint_of(lower) != fingerprint_of(BPE)


def test_a_saved_tokenizer_is_equal_and_readable_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    BPE.save(path)
    loaded = Tokenizer.load(path)
    assert (fingerprint_of(loaded), loaded.vocab_size, loaded.encode(TEXTS)) == (
        fingerprint_of(BPE),
        BPE.vocab_size,
        BPE.encode(TEXTS),
    )
    assert set(json.loads(path.read_text())["model"]["vocab"]) >= set(SPECIALS)


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_training_does_not_depend_on_order_threads_or_process(kind: str) -> None:
    pairs = cldr.generate_pairs("en", "it", limit=3000, held_out=50)[0]["train"]
    texts = [text for pair in pairs for text in pair]
    fingerprint = fingerprint_of(train_on(texts, kind))
    random.Random(0).shuffle(texts)
    assert fingerprint_of(train_on(texts, kind)) == fingerprint
    for threads, seed, parallel in (("1", "1", "true"), ("3", "2", "true"), ("2", "3", "false")):
        env = {
            **os.environ,
            "RAYON_NUM_THREADS": threads,
            "PYTHONHASHSEED": seed,
            "TOKENIZERS_PARALLELISM": parallel,
        }
        command = [sys.executable, str(TRAIN_TOKENIZER), kind]
        assert (
            subprocess.run(
                command, env=env, capture_output=True, text=True, check=True
            ).stdout.strip()
            == fingerprint
        )


def test_the_fingerprint_depends_on_the_vocabulary() -> None:
    assert (
        len(
            {
                fingerprint_of(BPE),
                fingerprint_of(train("word")),
                fingerprint_of(train(vocabulary=300)),
                fingerprint_of(train(texts=TEXTS[:4])),
            }
        )
        == 4
    )


def test_the_vocabulary_has_the_configured_size() -> None:
    assert train(vocabulary=300).vocab_size == 300
    assert train("word", vocabulary=8).vocab_size == 8


@pytest.mark.parametrize("content", ["", "{", '{"model": 1}', "\0\1"])
def test_a_damaged_tokenizer_is_a_data_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value)


def test_a_missing_or_incompatible_tokenizer_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no tokenizer"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    BPE.save(tmp_path / "tokenizer.json")
    text = (tmp_path / "tokenizer.json").read_text().replace("[BEGIN]", "[CLS]")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=r"\[CLS\]"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_very_long_word_does_not_slow_the_training_of_a_tokenizer() -> None:
    """Without truncation, learning the merges of these words takes minutes."""
    words = "".join(random.Random(1).choices("abcdefghij", k=1_000_000))
    texts = ["some text here\n" * 50, words, " " * 300_000, "short " * 10]
    tokenizer = Tokenizer.train_on_documents(texts, vocab_size=2000, min_frequency=2)
    assert tokenizer.decode(tokenizer.encode([words[:2000]])) == [words[:2000]]
    texts = ["some text here\n" * 50, "x" * MAX_WORD, "=" * MAX_WORD + "\n" * MAX_WORD]
    assert list(truncate_words(texts, WORDS_OF_DOCUMENTS)) == texts
