"""Sources of pairs and damage to them: each pair is kept or counted, or the source is refused."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import DataOptions
from lockstep.corpus import pairs as corpus
from lockstep.corpus.documents import source_of
from lockstep.corpus.pairs import Pairs, read_corpus
from lockstep.data.manifest import NOT_SHARED
from lockstep.errors import ConfigError, DataError

MULTI30K = Path(__file__).parents[3].parent / "shared/data/multi30k"
ENGLISH = [f"The cat number {i} sleeps." for i in range(40)]
ITALIAN = [f"Il gatto numero {i} dorme." for i in range(40)]


def write(path: Path, lines: Sequence[str], end: str = "\n") -> str:
    content = (end.join(lines) + end).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def two_files(folder: Path, suffix: str = "", name: str = "train") -> tuple[str, str]:
    return write(folder / f"{name}.en{suffix}", ENGLISH), write(
        folder / f"{name}.it{suffix}", ITALIAN
    )


def files(*train: str, held_out: int = 4, **options: object) -> DataOptions:
    return replace(DataOptions(kind="files", train=train, held_out=held_out), **options)  # type: ignore[arg-type]


def all_pairs(loaded: corpus.Corpus) -> Pairs:
    return sorted(loaded.train + loaded.validation + loaded.test)


# Files that are good.


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_two_texts_plain_or_gz(tmp_path: Path, suffix: str) -> None:
    loaded = read_corpus(files(*two_files(tmp_path, suffix)))
    assert all_pairs(loaded) == sorted(zip(ENGLISH, ITALIAN, strict=True))
    assert [len(loaded.train), len(loaded.validation), len(loaded.test)] == [32, 4, 4]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("heading", [[], ["en\tit"], ["it\tnote\ten"]])
def test_tsv_with_and_without_a_heading(tmp_path: Path, suffix: str, heading: list[str]) -> None:
    order = {"": "{en}\t{it}", "en\tit": "{en}\t{it}", "it\tnote\ten": "{it}\tx\t{en}"}[
        "".join(heading)
    ]
    rows = [order.format(en=en, it=it) for en, it in zip(ENGLISH, ITALIAN, strict=True)]
    assert all_pairs(
        read_corpus(files(write(tmp_path / f"a.tsv{suffix}", heading + rows)))
    ) == sorted(zip(ENGLISH, ITALIAN, strict=True))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    "shape",
    [
        '{"translation": {"en": %s, "it": %s}}',
        '{"en": %s, "it": %s, "id": 3}',
        '{"source": %s, "target": %s}',
    ],
)
def test_jsonl_in_three_shapes(tmp_path: Path, suffix: str, shape: str) -> None:
    rows = [
        shape % (json.dumps(en), json.dumps(it)) for en, it in zip(ENGLISH, ITALIAN, strict=True)
    ]
    assert all_pairs(read_corpus(files(write(tmp_path / f"a.jsonl{suffix}", rows)))) == sorted(
        zip(ENGLISH, ITALIAN, strict=True)
    )


def test_given_splits_are_used_and_missing_splits_are_held_out(tmp_path: Path) -> None:
    train, validation = two_files(tmp_path), two_files(tmp_path, name="validation")
    loaded = read_corpus(files(*train, validation=validation))
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (36, 40, 4)
    assert loaded.report["kept"] == {"train": 36, "validation": 40, "test": 4}


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """str.splitlines would cut at each of these and shift one side."""
    odd = ["one\u2028line", "two\x0blines\x0c", "three\x85", "four\x1c"] * 10
    en = write(tmp_path / "a.en", odd, end="\r\n")
    (tmp_path / "a.it").write_bytes(
        "\ufeff".encode() + "\n".join(ITALIAN).encode()
    )  # a byte order mark, and no feed at the end
    loaded = read_corpus(files(en, str(tmp_path / "a.it")))
    assert all_pairs(loaded) == sorted((a.strip(), b) for a, b in zip(odd, ITALIAN, strict=True))


def test_empty_lines_are_dropped_and_counted(tmp_path: Path) -> None:
    en = write(tmp_path / "a.en", ["", " ", "only English", *ENGLISH])
    it = write(tmp_path / "a.it", ["", "solo italiano", "\t", *ITALIAN])
    report = read_corpus(files(en, it)).report
    assert report["left_out"] == {"empty on one side": 2, "empty on both sides": 1}
    assert report["read"] == sum(report["kept"].values()) + sum(report["left_out"].values()) == 43
    assert (
        corpus.report_line(report)
        == "43 pairs read: 32 train, 4 validation, 4 test; dropped: 2 empty on one side, 1 empty on both sides"
    )


# Files that are bad.


def refused(
    data: DataOptions, *words: str, kind: type[DataError | ConfigError] = DataError
) -> None:
    """Assert that reading `data` fails with a three-part message that contains all `words`."""
    with pytest.raises(kind) as error:
        read_corpus(data)
    assert error.value.what and error.value.where and error.value.hint
    for word in words:
        assert word in str(error.value), str(error.value)


def test_sides_of_different_length_are_refused(tmp_path: Path) -> None:
    en, it = two_files(tmp_path)
    refused(files(en, write(Path(it), ITALIAN[:-1])), "40 and 39 lines", en, it)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_broken_utf8_is_refused_with_line_and_byte(tmp_path: Path, suffix: str) -> None:
    en, _ = two_files(tmp_path)
    content = "\n".join(["più"] * 39).encode() + "\ncittà".encode("latin1") + b"\n"
    path = tmp_path / f"bad.it{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    refused(files(en, str(path)), str(path), "0xe0", f"offset {39 * 5 + 4}", "line 40", "iconv")


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    en, it = two_files(tmp_path, ".gz")
    Path(it).write_bytes(Path(it).read_bytes()[:-12])
    refused(files(en, it), it, "gzip")
    Path(it).write_bytes(b"no gzip at all")
    refused(files(en, it), it, "gzip")


def test_missing_files_and_wrong_numbers_of_files_are_refused(tmp_path: Path) -> None:
    en, it = two_files(tmp_path)
    refused(files(en, f"{it}x"), f"{it}x", "No such file")
    refused(files(en, str(tmp_path)), str(tmp_path), "Is a directory")
    refused(files(), "data.train has 0 files")
    refused(files(en), "data.train has 1 file", ".tsv")
    refused(files(en, it, en), "data.train has 3 files")
    refused(files(en, it, test=(en,)), "data.test has 1 file")


@pytest.mark.parametrize(
    ("lines", "words"), [(["", "  ", ""], "none has text"), ([], "nothing was read")]
)
def test_an_empty_corpus_is_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    paths = tmp_path / "a.en", tmp_path / "a.it"
    for path in paths:
        path.write_text("".join(f"{line}\n" for line in lines))
    refused(files(*map(str, paths)), "training text is empty", words)


def test_an_empty_validation_text_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.tsv"
    empty.write_text("")
    refused(files(*two_files(tmp_path), validation=(str(empty),)), "the validation text is empty")


def test_a_corpus_too_small_to_hold_out_is_refused_with_a_size_that_works(tmp_path: Path) -> None:
    paths = two_files(tmp_path)
    refused(files(*paths, held_out=11), "40 pairs are too few", "data.held_out to 2")
    assert len(read_corpus(files(*paths, held_out=2)).test) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"en": "x", "de": "y"}', "no columns 'en' and 'it', but en, de"),
        ('{"translation": {"en": "x"}}', "no columns 'en' and 'it', but en"),
        ('{"en": 3, "it": "y"}', "int and str"),
        ('["x", "y"]', "no columns"),
        ('{"en": "x"', "not JSON"),
    ],
)
def test_bad_jsonl_is_refused_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "a.jsonl", ['{"en": "x", "it": "y"}', line])
    refused(files(path), words, "line 2", path)


def test_bad_tsv_is_refused_with_its_line(tmp_path: Path) -> None:
    refused(files(write(tmp_path / "a.tsv", ["a\tb", "c\td\te"])), "3 columns in line 2")
    refused(
        files(write(tmp_path / "a.tsv", ["id\ten\tde", "1\tc\td"])), "no header with 'en' and 'it'"
    )


# Held-out pairs.


def test_held_out_pairs_are_chosen_by_their_source_text_alone() -> None:
    pairs = list(zip(ENGLISH, ITALIAN, strict=True))
    train, validation, test = corpus.hold_out(pairs, 5, parts=2, where="")
    reordered = random.Random(1).sample(pairs, len(pairs))
    for part, other in zip(
        (train, validation, test), corpus.hold_out(reordered, 5, parts=2, where=""), strict=True
    ):
        assert set(part) == set(other)
    assert len(set(train) | set(validation) | set(test)) == 40
    assert [len(train), len(validation), len(test)] == [30, 5, 5]
    assert validation == [pair for pair in pairs if pair in validation]  # in the corpus's order


def test_equal_sources_are_in_one_split() -> None:
    draw = random.Random(3)
    for _ in range(50):
        pairs = [(f"s{draw.randrange(25)}", f"t{i}") for i in range(100)]
        parts = corpus.hold_out(pairs, draw.randrange(1, 20), parts=2, where="")
        sources = [{source for source, _ in part} for part in parts]
        assert not (sources[0] & sources[1] or sources[0] & sources[2] or sources[1] & sources[2])
        assert sorted(pair for part in parts for pair in part) == sorted(pairs)


# The source, by its bytes.


def described(data: DataOptions) -> dict[str, Any]:
    return source_of(data, NOT_SHARED.of)


def test_the_fingerprint_depends_on_the_bytes_of_the_files(tmp_path: Path) -> None:
    paths = two_files(tmp_path)
    data = files(*paths)
    source = described(data)
    assert described(data) == source
    write(Path(paths[1]), [*ITALIAN[:-1], "Altro."])
    assert described(data) != source


def test_the_fingerprint_does_not_depend_on_the_folder_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    assert described(files(*two_files(tmp_path))) == described(
        files(*two_files(tmp_path / "moved"))
    )


def test_generated_pairs_are_read_as_a_corpus() -> None:
    data = DataOptions(pairs=2000, held_out=50)
    loaded = read_corpus(data)
    assert loaded.report["kept"] == {"train": 2000, "validation": 50, "test": 50}
    assert loaded.report["read"] == 2100 + sum(loaded.report["left_out"].values())
    assert loaded == read_corpus(data)
    assert described(data) == described(data) != described(replace(data, target="de"))


# The real corpus.


def multi30k() -> DataOptions:
    if not MULTI30K.is_dir():
        pytest.skip(f"the Multi30k corpus is not at {MULTI30K}")

    def pair(name: str) -> tuple[str, str]:
        return str(MULTI30K / f"{name}.en.gz"), str(MULTI30K / f"{name}.de.gz")

    return DataOptions(
        kind="files",
        target="de",
        train=pair("train"),
        validation=pair("val"),
        test=pair("test_2016_flickr"),
    )


def test_multi30k_is_read_whole() -> None:
    loaded = read_corpus(multi30k())
    assert loaded.report["kept"] == {"train": 29_000, "validation": 1014, "test": 1000}
    assert loaded.report["left_out"] == {}
    assert loaded.train[0][0].startswith("Two young, White males")
    assert loaded.train[0][1].startswith("Zwei junge weiße Männer")


# Hugging Face datasets: importing the library takes seconds, so these tests run in one process.


def test_the_datasets_library_is_imported_on_demand() -> None:
    program = "import sys, lockstep.corpus.pairs, lockstep.corpus.encoded_pairs; sys.exit('datasets' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the schema of Helsinki-NLP/opus_books: as save_to_disk and as parquet files."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("hub")
    rows = [
        {"id": str(i), "translation": {"en": a, "it": b}}
        for i, (a, b) in enumerate(zip(ENGLISH, ITALIAN, strict=True))
    ]
    rows[7]["translation"] = {"en": "No Italian.", "it": None}
    books = datasets.Dataset.from_list(rows)
    books.save_to_disk(str(folder / "alone"))
    datasets.DatasetDict({"train": books, "validation": books.select(range(5))}).save_to_disk(
        str(folder / "splits")
    )
    (folder / "parquet").mkdir()
    books.to_parquet(str(folder / "parquet/train-00000-of-00001.parquet"))
    flat = datasets.Dataset.from_list(
        [{"en": a, "it": b, "score": 1.0} for a, b in zip(ENGLISH, ITALIAN, strict=True)]
    )
    flat.save_to_disk(str(folder / "flat"))
    return folder


def books(folder: Path, **options: object) -> DataOptions:
    return replace(DataOptions(kind="huggingface", dataset=str(folder), held_out=3), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["alone", "parquet"])
def test_a_local_dataset_of_the_hubs_schema(
    hub: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    loaded = read_corpus(books(hub / name))
    assert set(all_pairs(loaded)) == set(zip(ENGLISH, ITALIAN, strict=True)) - {
        (ENGLISH[7], ITALIAN[7])
    }
    assert loaded.report["left_out"] == {"empty on one side": 1}
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (33, 3, 3)


def test_the_splits_of_a_dataset_are_used(hub: Path) -> None:
    loaded = read_corpus(books(hub / "splits"))
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (36, 5, 3)
    assert read_corpus(books(hub / "splits", test=("validation",))).test == loaded.validation


def test_columns_named_by_the_languages(hub: Path) -> None:
    assert all_pairs(read_corpus(books(hub / "flat"))) == sorted(zip(ENGLISH, ITALIAN, strict=True))


def test_a_local_dataset_has_the_fingerprint_of_its_files(hub: Path) -> None:
    assert described(books(hub / "alone")) == described(books(hub / "alone"))
    alone, flat = (described(books(hub / name))["dataset_files"] for name in ("alone", "flat"))
    assert alone != flat


def test_datasets_that_do_not_fit_are_refused(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    refused(books(hub / "alone", target="de"), "no columns 'en' and 'de', but en, it", "row 0")
    refused(
        books(hub / "flat", source="fr", target="de"),
        "no column 'translation' or 'fr' or 'de' or 'source' or 'target', but en, it, score",
    )
    refused(
        books(hub / "splits", test=("dev",)), "no split 'dev', but train, validation", "data.test"
    )
    refused(books(tmp_path / "absent"), "cannot be loaded", "absent")
    refused(books(tmp_path), "cannot be loaded")
    refused(books(hub / "splits", test=("a", "b")), "several splits", kind=ConfigError)
