"""Preparation of a corpus: once, completely, and with the requested settings, or an error."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.config.schema import DataOptions, TokenizerOptions
from lockstep.corpus import encoded_pairs as module
from lockstep.corpus.encoded_pairs import PreparedPairs, open_prepared, prepare
from lockstep.corpus.pairs import Pairs
from lockstep.corpus.tokenizer import END
from lockstep.data.manifest import read_manifest
from lockstep.errors import DataError
from lockstep.files import sha256_file

SMALL, TOKENS = DataOptions(pairs=1500, held_out=40), TokenizerOptions(vocab_size=1000)
MULTI30K = Path(__file__).parents[3].parent / "shared/data/multi30k"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "data"
    prepare(SMALL, TOKENS, folder)
    return folder


@pytest.fixture
def ready(original: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder for one test."""
    return Path(shutil.copytree(original, tmp_path / "data"))


def texts(folder: Path, sentences: list[str]) -> DataOptions:
    for language in ("en", "it"):
        (folder / f"t.{language}").write_text("".join(f"{sentence}\n" for sentence in sentences))
    return DataOptions(kind="files", train=(str(folder / "t.en"), str(folder / "t.it")), held_out=1)


def text_of(prepared: PreparedPairs, split: str) -> Pairs:
    return [(record["source"], record["target"]) for record in prepared.records(split)]


def test_the_opened_corpus_equals_the_source(ready: Path) -> None:
    prepared, text = open_prepared(ready), module.read_corpus(SMALL)
    assert text_of(prepared, "validation") == text.validation
    assert text_of(prepared, "test") == text.test
    for split in ("train", "validation", "test"):
        pairs, encoded = getattr(text, split), getattr(prepared, split)
        assert len(pairs) == len(encoded)
        _, _, labels = encoded.gather(np.arange(len(pairs)), len(pairs), 40, 40)
        assert prepared.tokenizer.decode([row[: row.index(END)] for row in labels.tolist()]) == [
            target for _, target in pairs
        ]
    assert prepared.report == text.report
    assert prepared.fingerprints["tokenizer"] == sha256_file(ready / "tokenizer.json")


def test_the_vocabulary_is_learned_from_training_text_alone(tmp_path: Path) -> None:
    data = texts(tmp_path, [f"word{chr(97 + i) * 6} again" for i in range(8)])
    prepare(data, TokenizerOptions(kind="word", min_frequency=1), tmp_path / "data")
    prepared = open_prepared(tmp_path / "data")
    held_out = {text_of(prepared, split)[0][0] for split in ("validation", "test")}
    assert len(held_out) == 2
    assert (
        prepared.tokenizer.decode(prepared.tokenizer.encode(sorted(held_out)))
        == ["[UNKNOWN] again"] * 2
    )


def test_a_second_preparation_changes_nothing(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in ready.iterdir()}
    monkeypatch.setattr(module, "read_corpus", lambda data: pytest.fail("the text was read again"))
    prepare(SMALL, TOKENS, ready)
    assert {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in ready.iterdir()
    } == before


def test_two_preparations_are_equal_byte_for_byte(ready: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from lockstep.config.schema import DataOptions, TokenizerOptions; "
        "from lockstep.corpus.encoded_pairs import prepare;"
        "prepare(DataOptions(pairs=1500, held_out=40), TokenizerOptions(vocab_size=1000), Path(sys.argv[1]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "other")], env=env, check=True)
    files, other_files = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (ready, tmp_path / "other")
    )
    assert files == other_files


@pytest.mark.parametrize(
    ("data", "tokens", "words"),
    [
        (replace(SMALL, pairs=1600), TOKENS, "data.pairs: prepared with 1500, asked for 1600"),
        (
            SMALL,
            replace(TOKENS, vocab_size=900),
            "tokenizer.vocab_size: prepared with 1000, asked for 900",
        ),
        (
            replace(SMALL, max_tokens=64),
            replace(TOKENS, kind="word"),
            "max_tokens, tokenizer.kind differ",
        ),
    ],
)
def test_another_corpus_in_the_folder_is_refused(
    ready: Path, data: DataOptions, tokens: TokenizerOptions, words: str
) -> None:
    with pytest.raises(DataError) as error:
        prepare(data, tokens, ready)
    assert words in str(error.value)
    assert str(ready) in error.value.where


def test_changed_files_are_refused_and_missing_files_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = texts(tmp_path, [f"sentence number {i}" for i in range(20)])
    prepare(data, TOKENS, tmp_path / "data")
    texts(tmp_path, [f"sentence number {i}" for i in range(21)])
    with pytest.raises(DataError, match="source differs"):
        prepare(data, TOKENS, tmp_path / "data")
    (tmp_path / "t.en").unlink()
    with caplog.at_level(logging.WARNING, "lockstep"):
        prepare(data, TOKENS, tmp_path / "data")
    assert "its source cannot be compared" in caplog.text
    with pytest.raises(DataError, match=r"tokenizer\.kind differs"):
        prepare(data, replace(TOKENS, kind="word"), tmp_path / "data")


def test_too_long_pairs_are_dropped_from_the_arrays_but_kept_in_held_out_text(
    tmp_path: Path,
) -> None:
    short, long = "a b c", " ".join("abcdefghijklmnop")
    train = [f"{short} {i}" for i in range(10)] + [f"{long} {i}" for i in range(5)]
    data = replace(texts(tmp_path, train), max_tokens=12)
    held_out = [f"{short} x", f"{long} y", f"{short} z"]
    for language in ("en", "it"):
        (tmp_path / f"v.{language}").write_text("\n".join(held_out))
    data = replace(
        data, validation=(str(tmp_path / "v.en"), str(tmp_path / "v.it")), test=data.train
    )
    prepare(data, TOKENS, tmp_path / "data")
    prepared = open_prepared(tmp_path / "data")
    assert (len(prepared.train), len(prepared.validation), len(prepared.test)) == (10, 2, 10)
    assert prepared.train.lengths.max() <= 12
    assert [source for source, _ in text_of(prepared, "validation")] == held_out
    assert len(text_of(prepared, "test")) == 15
    assert prepared.report["left_out"] == {"longer than 12 tokens": 5}
    assert prepared.report["kept"] == {"train": 10, "validation": 3, "test": 15}
    assert prepared.report["read"] == sum(prepared.report["kept"].values()) + 5
    assert json.loads((tmp_path / "data/prepared.json").read_text())["too_long"] == {
        "train": 5,
        "validation": 1,
        "test": 5,
    }


def test_the_longest_pair_has_max_tokens_including_end(tmp_path: Path) -> None:
    data = texts(tmp_path, ["1 2 3 4", "1 2 3", "1 2 5", "1 2 4", "1 2 6"] * 2)
    prepare(replace(data, max_tokens=4), TOKENS, tmp_path / "data")
    assert open_prepared(tmp_path / "data").train.lengths.max() == 4


def test_a_corpus_of_only_long_pairs_is_refused(tmp_path: Path) -> None:
    data = texts(tmp_path, [f"one two three four five six {i}" for i in range(9)])
    with pytest.raises(DataError, match="no training pair has at most 4 tokens"):
        prepare(replace(data, max_tokens=4), TOKENS, tmp_path / "data")
    with pytest.raises(DataError, match="no data was prepared"):
        open_prepared(tmp_path / "data")


def test_a_flipped_bit_or_a_missing_file_is_detected_on_opening(ready: Path) -> None:
    names = sorted(path.name for path in ready.iterdir())
    assert len(names) == 22
    for name in names:
        path, content = ready / name, (ready / name).read_bytes()
        if name != "prepared.json":
            for at in (0, len(content) // 2, len(content) - 1):
                path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
                with pytest.raises(DataError) as error:
                    open_prepared(ready)
                assert name in error.value.what
                assert "sha256" in error.value.where
        path.unlink()
        with pytest.raises(DataError, match=r"missing|no data was prepared"):
            open_prepared(ready)
        path.write_bytes(content)
    open_prepared(ready)


def test_a_flipped_bit_of_the_manifest_is_detected(ready: Path) -> None:
    path = ready / "prepared.json"
    manifest = read_manifest(ready)
    content = path.read_bytes()
    for at in range(0, len(content), 3):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 7]) + content[at + 1 :])
        with suppress(DataError):
            assert read_manifest(ready) == manifest, at


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_manifest_is_a_data_error_for_both(ready: Path, content: str) -> None:
    (ready / "prepared.json").write_text(content)
    with pytest.raises(DataError, match="damaged"):
        open_prepared(ready)
    with pytest.raises(DataError, match="damaged"):
        prepare(SMALL, TOKENS, ready)


@pytest.mark.slow
def test_a_preparation_killed_at_any_time_is_repeated(original: Path, tmp_path: Path) -> None:
    """The manifest is written last: files of a killed process are overwritten."""
    program = (
        "import sys; from pathlib import Path; from lockstep.config.schema import DataOptions, TokenizerOptions; "
        "from lockstep.corpus.encoded_pairs import prepare;"
        "print('go', flush=True); prepare(DataOptions(pairs=1500, held_out=40), TokenizerOptions(vocab_size=1000), Path(sys.argv[1]))"
    )
    folder = tmp_path / "data"
    for wait_s in (0.1, 0.3, 0.5):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout
            child.stdout.readline()
            time.sleep(wait_s)
            child.send_signal(signal.SIGKILL)
        if not (folder / "prepared.json").exists():
            with pytest.raises(DataError, match="no data was prepared"):
                open_prepared(folder)
    prepare(SMALL, TOKENS, folder)
    assert open_prepared(folder).fingerprints == open_prepared(original).fingerprints
    assert {path.name for path in original.iterdir()} <= {path.name for path in folder.iterdir()}


def test_lower_case_reaches_the_arrays(tmp_path: Path) -> None:
    prepare(
        texts(tmp_path, [f"HELLO There {i}" for i in range(9)]),
        replace(TOKENS, lowercase=True),
        tmp_path / "data",
    )
    prepared = open_prepared(tmp_path / "data")
    assert text_of(prepared, "test")[0][0].startswith("HELLO There")
    assert prepared.tokenizer.decode(prepared.tokenizer.encode(["HELLO There 3"])) == [
        "hello there 3"
    ]


@pytest.mark.slow
def test_multi30k_is_prepared_completely(tmp_path: Path) -> None:
    if not MULTI30K.is_dir():
        pytest.skip(f"the Multi30k corpus is not at {MULTI30K}")

    def pair(name: str) -> tuple[str, str]:
        return str(MULTI30K / f"{name}.en.gz"), str(MULTI30K / f"{name}.de.gz")

    data = DataOptions(
        kind="files",
        target="de",
        train=pair("train"),
        validation=pair("val"),
        test=pair("test_2016_flickr"),
    )
    prepare(data, TokenizerOptions(vocab_size=8000, lowercase=True), tmp_path / "data")
    prepared = open_prepared(tmp_path / "data")
    assert (len(prepared.train), len(prepared.validation), len(prepared.test)) == (
        29_000,
        1014,
        1000,
    )
    assert prepared.tokenizer.vocab_size == 8000
    assert 14 < prepared.train.lengths[:, 1].mean() < 17


@pytest.mark.parametrize("kind", ["cldr", "files"])
def test_holding_out_is_optional(tmp_path: Path, kind: str) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"the cat {i}\tdie Katze {i}\n" for i in range(30)))
    source = (
        DataOptions(kind="files", train=(str(tmp_path / "pairs.tsv"),), target="de")
        if kind == "files"
        else DataOptions(pairs=300)
    )
    prepare(replace(source, held_out=0), TokenizerOptions(vocab_size=300), tmp_path / "data")
    prepared = open_prepared(tmp_path / "data")
    assert len(prepared.train) > 20 and len(prepared.validation) == len(prepared.test) == 0
    assert not text_of(prepared, "validation") and not text_of(prepared, "test")
