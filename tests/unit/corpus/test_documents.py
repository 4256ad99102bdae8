"""Reading documents and chats: held out by hash, split, refused with their line."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config.resolve import resolve
from lockstep.config.schema import DataOptions
from lockstep.corpus import documents as reader
from lockstep.corpus.chats import chats, drills
from lockstep.corpus.documents import SPLITS, documents, source_of
from lockstep.errors import ConfigError, DataError

TEXT = DataOptions(kind="text", held_out_share=0.2)


def split_of(data: DataOptions) -> dict[str, str]:
    return {document.text: split for split, document in documents(data)}


@pytest.mark.slow
def test_the_standard_library_without_installed_packages() -> None:
    pairs = list(documents(DataOptions(kind="stdlib")))
    names = {document.name: split for split, document in pairs}
    assert {"argparse.py", "json/decoder.py"} <= names.keys() and not any(
        name.startswith("site-packages") for name in names
    )
    shares = {
        split: sum(chosen == split for chosen in names.values()) / len(names)
        for split in ("validation", "test")
    }
    assert all(0.004 < share < 0.03 for share in shares.values()), shares


def test_equal_texts_are_in_one_split_in_any_order(tmp_path: Path) -> None:
    texts = [f"text {i % 60}\n" for i in range(120)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts[::-1]).encode())
    )
    forwards, backwards = (
        split_of(replace(TEXT, train=(str(tmp_path / name),))) for name in ("a.jsonl", "b.jsonl.gz")
    )
    assert forwards == backwards and len(forwards) == 60
    assert Counter(forwards.values()).keys() == {"train", "validation", "test"}
    both_files = list(documents(replace(TEXT, train=(str(tmp_path / "*.json*"),))))
    assert (
        len(both_files) == 240
        and {document.text: split for split, document in both_files} == forwards
    )


def test_a_split_with_files_consists_of_these_files(tmp_path: Path) -> None:
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"body": f"{name} {i}"}) + "\n\n" for i in range(50))
        )
    data = replace(
        TEXT,
        column="body",
        train=(f"{tmp_path}/train.jsonl",),
        validation=(f"{tmp_path}/held.jsonl",),
    )
    counts = Counter((split, document.text.split()[0]) for split, document in documents(data))
    assert counts["validation", "held"] == 50 and ("validation", "train") not in counts
    assert counts["train", "train"] + counts["test", "train"] == 50 and counts["test", "train"] > 0


def test_a_long_file_is_cut_at_the_ends_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 100)
    lines = [f"line {i}: häuser\n" for i in range(40)]
    (tmp_path / "long.txt").write_text("".join(lines) + "no end")
    pieces = [
        document.text
        for _, document in documents(
            replace(TEXT, train=(str(tmp_path / "long.txt"),), held_out_share=0.0)
        )
    ]
    assert "".join(pieces) == "".join(lines) + "no end"
    assert len(pieces) > 5 and all(
        len(piece.encode()) <= 100 and piece.endswith(("\n", "no end")) for piece in pieces
    )


def test_the_source_of_documents_is_the_same_from_every_folder_and_another_when_the_text_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 20_000)
    source = source_of(replace(TEXT, train=(str(tmp_path / "a.txt"),)))
    assert source["train"][0][:2] == ["a.txt", 200_000]
    monkeypatch.chdir(tmp_path)
    assert source_of(replace(TEXT, train=("*.txt",))) == source
    (tmp_path / "a.txt").write_text("some text\n" * 19_999 + "else text\n")
    assert source_of(replace(TEXT, train=("a.txt",))) != source


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\n\xff\xfe", r"a\.txt is not UTF-8: byte 0xff"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "no text in the column 'text', but txt"),
        ("a.jsonl", b"[1]\n", "no text in the column 'text', but int"),
        ("a.jsonl", b"{\n", "not JSON"),
        ("a.txt.gz", b"\x1f\x8bgarbage", "cannot be read"),
    ],
)
def test_unreadable_files_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(documents(replace(TEXT, train=(str(tmp_path / name),))))
    with pytest.raises(DataError, match="there is no file"):
        list(documents(replace(TEXT, train=(str(tmp_path / "other*"),))))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text datasets with one column `text`: from save_to_disk, with splits, as parquet."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("hub")
    texts = [f"Document {i}: häuser.\n" for i in range(60)]
    rows = datasets.Dataset.from_list(
        [{"id": i, "text": text} for i, text in enumerate([*texts, "", None])]
    )
    datasets.DatasetDict({"train": rows, "validation": rows.select(range(5))}).save_to_disk(
        str(folder / "splits")
    )
    (folder / "parquet").mkdir()
    rows.to_parquet(str(folder / "parquet/train-00000-of-00001.parquet"))
    return folder


def test_a_column_of_a_dataset_is_read(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    data = DataOptions(kind="huggingface", held_out_share=0.1)
    splits = split_of(replace(data, dataset=str(hub / "parquet")))
    assert sorted(splits) == sorted(f"Document {i}: häuser.\n" for i in range(60)), (
        "rows without text are dropped"
    )
    assert Counter(splits.values()).keys() == {"train", "validation", "test"}
    own = Counter(
        split
        for split, _ in documents(
            replace(data, dataset=str(hub / "splits"), validation=("validation",))
        )
    )
    assert own["validation"] == 5 and own["train"] + own["test"] == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "body"}, "no column 'body', but id, text"),
        ({"validation": ("dev",)}, "no split 'dev', but train, validation"),
        ({"dataset": "absent"}, "cannot be loaded"),
    ],
)
def test_a_missing_column_or_split_is_refused(
    hub: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    named = {
        name: str(tmp_path / "absent") if name == "dataset" else value
        for name, value in options.items()
    }
    with pytest.raises(DataError, match=message):
        list(
            documents(
                replace(DataOptions(kind="huggingface", dataset=str(hub / "splits")), **named)
            )
        )  # type: ignore[arg-type]


def test_the_splits_of_a_dataset_are_used_unchanged(hub: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = DataOptions(kind="huggingface", held_out_share=0.1)
    own = Counter(split for split, _ in documents(replace(data, dataset=str(hub / "splits"))))
    assert own["validation"] == 5 and own["train"] + own["test"] == 60, "without being named"
    rows = datasets.Dataset.from_list([{"text": f"Document {i}."} for i in range(60)])
    rows.save_to_disk(str(tmp_path / "one"))
    unsplit = replace(data, dataset=str(tmp_path / "one"))
    assert Counter(split for split, _ in documents(unsplit)).keys() == {
        "train",
        "validation",
        "test",
    }
    for named, message in (
        ({"validation": ("validation",)}, "no split 'validation', but train"),
        ({"validation": ("train",)}, "data.train and data.validation are one split, 'train'"),
        ({"train": ("all",)}, "no split 'all', but train"),
    ):
        with pytest.raises(DataError, match=message):
            list(documents(replace(unsplit, **named)))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"no split 'validaton'") as caught:
        list(documents(replace(data, dataset=str(hub / "splits"), test=("validaton",))))
    assert caught.value.hint == "try data.test=validation"


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ({}, {"train": "train", "validation": "validation", "test": "test"}),
        ({"train": "validation"}, {"train": "validation", "test": "test"}),
        (
            {"validation": "test", "test": "validation"},
            {"train": "train", "validation": "test", "test": "validation"},
        ),
    ],
)
def test_a_split_is_not_used_twice(requested: dict[str, str], expected: dict[str, str]) -> None:
    reader = pytest.importorskip("lockstep.corpus.huggingface")
    assert (
        reader.choose_splits(
            {"train": "", "validation": "", "test": "", **requested}, list(SPLITS), "here"
        )
        == expected
    )


def test_a_file_in_two_splits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    data = replace(
        TEXT, train=(f"{tmp_path}/*.jsonl",), validation=(f"{tmp_path}/../{tmp_path.name}/a.jsonl",)
    )
    for read in (documents(data), chats(replace(data, kind="chat"), Counter())):
        with pytest.raises(DataError, match=r"is both in data\.train and in data\.validation"):
            list(read)


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"line {i}: häuser\n" for i in range(900)),
        " ".join(map(str, range(3000))),
        "x" * 3000,
    ],
)
def test_parts_of_few_documents_are_held_out(tmp_path: Path, text: str) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number in (1, 2):
        for path in paths[:number]:
            path.write_text(text)
        data = replace(TEXT, train=tuple(map(str, paths[:number])), held_out_share=0.1)
        parts = list(documents(data))
        assert [split for split, _ in parts] == list(SPLITS) * number
        assert "".join(document.text for _, document in parts) == text * number
        for split, document in parts[:3]:
            assert len(document.text) / len(text) == pytest.approx(
                0.8 if split == "train" else 0.1, abs=0.06
            )
            assert document.text.endswith(("\n", " ")) or split == "test" or text[0] == "x"
    (tmp_path / "held.txt").write_text("held out")
    parts = list(
        documents(replace(data, train=data.train[:1], validation=(str(tmp_path / "held.txt"),)))
    )
    assert [split for split, _ in parts] == ["train", "test", "validation"]
    assert [split for split, _ in documents(replace(data, held_out_share=0.0))] == ["train"] * 2


def test_chats_are_cut_after_the_last_answer(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    lines = [{"messages": [user, answer, user]}, {"messages": [user]}, {"messages": [user, answer]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    left_out: Counter[str] = Counter()
    messages = [
        chat.messages
        for _, chat in chats(
            DataOptions(kind="chat", train=(str(path),), held_out_share=0.0), left_out
        )
    ]
    assert messages == [[user, answer], [user, answer]] and left_out == {"without an answer": 1}
    path.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(DataError, match="not a chat"):
        list(chats(DataOptions(kind="chat", train=(str(path),)), left_out))


def test_drills_ignore_the_files_of_a_recipe() -> None:
    data = DataOptions(kind="drills", train=("chats.jsonl",), pairs=20, held_out_share=0.2)
    assert source_of(data) == {} and sum(1 for _ in chats(data, Counter())) == 20


def test_drills_are_correct_and_deterministic() -> None:
    first, second = list(drills(300)), list(drills(300))
    assert first == second
    for chat in first:
        question, answer = (message["content"] for message in chat.messages)
        numbers = [
            int(word.strip("?,.")) for word in question.split() if word.strip("?,.").isdigit()
        ]
        answers = {
            "Which": str(max(numbers)),
            "What": f"{numbers[0] + 1}.",
            "How": f"{numbers[0]} + {numbers[-1]} = {sum(numbers)}",
        }
        assert answer == answers[question.split()[0]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"task": "pretrain"}, r"task=pretrain does not support data\.kind=cldr"),
        ({"data.kind": "stdlib"}, r"task=translate does not support data\.kind=stdlib"),
        (
            {"task": "sft", "data.kind": "chat"},
            r"data\.kind=chat needs data\.train, which is empty",
        ),
        (
            {"task": "pretrain", "data.kind": "stdlib", "batch.tokens": "1000"},
            r"is not a multiple of batch\.seq_len=512",
        ),
        (
            {"task": "pretrain", "data.kind": "stdlib", "llama.max_seq_len": "128"},
            r"llama\.max_seq_len=128",
        ),
        (
            {"task": "pretrain", "data.kind": "stdlib", "tokenizer.lowercase": "true"},
            "keeps every byte",
        ),
        ({"task": "sft", "data.kind": "drills", "lora.rank": "8"}, "adapters need a trained model"),
        (
            {"task": "sft", "data.kind": "drills", "lora.rank": "8", "lora.targets": ""},
            "lora.targets, which is empty",
        ),
        (
            {"task": "sft", "data.kind": "drills", "lora.targets": "query,other"},
            "unknown lora.targets: other",
        ),
        ({"task": "pretrain", "data.kind": "stdlib", "llama.size": "7M"}, "llama.size = '7M'"),
    ],
)
def test_conflicting_values_are_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(None, flags)
