"""Prepared data that runs share: taken when everything it depends on is equal, and never damaged."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.launching import run_lockstep

from lockstep.config.resolve import resolve
from lockstep.config.schema import DataOptions, TokenizerOptions
from lockstep.corpus import cache, encoded_pairs, loaders, prepared
from lockstep.corpus.documents import content_of
from lockstep.corpus.encoded_pairs import open_prepared, prepare
from lockstep.corpus.loaders import save_packed_rows
from lockstep.corpus.token_stream import TokenStream
from lockstep.data.manifest import NOT_SHARED
from lockstep.models import hub
from lockstep.models.llama import Llama
from lockstep.models.llama_config import LlamaConfig, config_to_hf
from lockstep.tasks import language_model
from lockstep.tasks.language_model import prepare_chats, prepare_documents

TOKENS = TokenizerOptions(vocab_size=400)
PROGRAM = """
import sys
from pathlib import Path
from lockstep.config.schema import DataOptions, TokenizerOptions
from lockstep.corpus.encoded_pairs import prepare
prepare(DataOptions(pairs=1500, held_out=40), TokenizerOptions(vocab_size=400), Path(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The entries of an empty cache."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepared"


@pytest.fixture
def pairs(tmp_path: Path) -> DataOptions:
    """A corpus of which only the middle, beyond both ends that a resumed run compares, varies."""
    line = "line {} of the many lines of this text\triga {} delle molte righe di questo testo\n"
    text = "".join(line.format(number, number) for number in range(3000))
    (tmp_path / "pairs.tsv").write_text(text)
    return DataOptions(kind="files", train=(str(tmp_path / "pairs.tsv"),), held_out=20)


def first_entry(pairs: DataOptions, folder: Path, entries: Path) -> Path:
    """Prepare the pairs in folder/first; return the entry that this adds."""
    prepare(pairs, TOKENS, folder / "first")
    (entry,) = entries.iterdir()
    return entry


def content_of_folder(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fail_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every preparation fail, and with it each test in which a run is to take the data."""
    for module, name in (
        (encoded_pairs, "read_corpus"),
        (prepared, "write_samples"),
        (prepared, "train_tokenizer"),
        (language_model, "copy_files"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("prepared again"))


def prepare_text(values: Mapping[str, Any], folder: Path) -> None:
    run = resolve(None, {"tokenizer.vocab_size": 400, "llama.size": "1M", **values}).run
    if run.task == "sft":
        prepare_chats(run, folder, NOT_SHARED)
    else:
        prepare_documents(run, folder)


def text_of(path: Path) -> dict[str, Any]:
    lines = [f"Line {number} of a text about {number % 7} things.\n" for number in range(9000)]
    path.write_text("".join(lines))
    return {"task": "pretrain", "data.kind": "text", "data.train": str(path)}


CHATS = {"task": "sft", "data.kind": "drills", "data.pairs": 60, "batch.seq_len": 64}


def test_a_second_run_has_the_same_bytes_and_prepares_nothing(
    pairs: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(pairs, TOKENS, tmp_path / "first")
    monkeypatch.setenv("LOCKSTEP_CACHE", "off")
    prepare(pairs, TOKENS, tmp_path / "alone")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    fail_to_read(monkeypatch)
    prepare(pairs, TOKENS, tmp_path / "second")
    first, second, alone = map(
        content_of_folder, (tmp_path / "first", tmp_path / "second", tmp_path / "alone")
    )
    assert first == second == alone
    fingerprints = [open_prepared(tmp_path / name).fingerprints for name in ("second", "alone")]
    assert fingerprints[0] == fingerprints[1]
    inodes = {
        (tmp_path / name / "train.source.00000.ids").stat().st_ino for name in ("first", "second")
    }
    assert len(inodes) == 1, "the disk holds the bytes once"


@pytest.mark.parametrize("kind", ["documents", "chats"])
def test_runs_of_a_llama_share_tokenizer_and_streams(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = CHATS if kind == "chats" else text_of(tmp_path / "text.txt")
    with caplog.at_level(logging.INFO, "lockstep"):
        prepare_text(values, tmp_path / "first")
        lines = [record.message for record in caplog.records if "documents," in record.message]
        caplog.clear()
        fail_to_read(monkeypatch)
        prepare_text(values, tmp_path / "second")
    assert content_of_folder(tmp_path / "first") == content_of_folder(tmp_path / "second")
    assert (tmp_path / "second/tokenizer/chat_template.jinja").is_file()
    assert len(lines) == 3 and set(lines) < {record.message for record in caplog.records}


def test_runs_share_packed_chats(
    tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        prepare_text(CHATS, tmp_path / name)
    stream = TokenStream.open(tmp_path / "first/data", "train")
    arguments = stream, 64, 3, "the data"
    file, digest = save_packed_rows(tmp_path / "first/data", *arguments)
    other, _ = save_packed_rows(tmp_path / "first/data", stream, 64, 4, "the data")
    assert other != file and len(list(entries.iterdir())) == 3
    monkeypatch.setattr(loaders, "pack", lambda *_: pytest.fail("packed again"))
    assert save_packed_rows(tmp_path / "second/data", *arguments) == (file, digest)
    first, second = (tmp_path / name / "data" / file for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_whatever_the_data_depends_on_makes_another_entry(
    pairs: DataOptions, tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pairs.tsv"

    def edit_the_middle() -> None:
        text = path.read_text()
        path.write_text(text.replace("riga 1500", "riga 1501"))

    text = text_of(tmp_path / "text.txt")

    def edit_the_text() -> None:
        lines = (tmp_path / "text.txt").read_text()
        assert lines.index("Line 4500") > 65_536 < len(lines) - lines.index("Line 4500")
        (tmp_path / "text.txt").write_text(lines.replace("Line 4500", "Line 4501"))

    def move_the_text() -> None:
        shutil.copy(tmp_path / "text.txt", tmp_path / "other.txt")

    other_text = text | {"data.train": str(tmp_path / "other.txt")}
    changes: list[tuple[Callable[[], None], Callable[[Path], None]]] = [
        (lambda: None, lambda out: prepare(pairs, TOKENS, out)),
        (lambda: None, lambda out: prepare(replace(pairs, max_tokens=64), TOKENS, out)),
        (lambda: None, lambda out: prepare(pairs, replace(TOKENS, lowercase=True), out)),
        (edit_the_middle, lambda out: prepare(pairs, TOKENS, out)),
        (
            lambda: monkeypatch.setattr(prepared, "versions", lambda: ["another version"]),
            lambda out: prepare(pairs, TOKENS, out),
        ),
        (lambda: None, lambda out: prepare_text(text, out)),
        (edit_the_text, lambda out: prepare_text(text, out)),
        (lambda: None, lambda out: prepare_text(text | {"data.held_out_share": 0.02}, out)),
        (move_the_text, lambda out: prepare_text(other_text, out)),  # the records name it
        (lambda: None, lambda out: prepare_text(CHATS, out)),
        (lambda: None, lambda out: prepare_text(CHATS | {"batch.seq_len": 128}, out)),
    ]
    for number, (change, run) in enumerate(changes, start=1):
        change()
        run(tmp_path / f"run-{number}")
        assert len(list(entries.iterdir())) == number
    fail_to_read(monkeypatch)
    prepare_text(text, tmp_path / "again")
    assert len(list(entries.iterdir())) == len(changes)


def chats_of_a_model(folder: Path) -> dict[str, Any]:
    """Write a model with the tokenizer of a run under `folder`; return values that use it."""
    prepare_text(CHATS, folder / "base")
    config = LlamaConfig(400, 32, 1, 2, 1, 16, 64, 64, 10_000.0)
    weights = {name: tensor.detach() for name, tensor in Llama(config).state_dict().items()}
    companions = sorted((folder / "base/tokenizer").iterdir())
    hub.write_hub(folder / "hub", config_to_hf(config), weights, companions=companions)
    return CHATS | {"llama.init_from": str(folder / "hub")}


def test_the_tokenizer_of_a_model_makes_another_entry(tmp_path: Path, entries: Path) -> None:
    from_hub = chats_of_a_model(tmp_path)
    prepare_text(from_hub, tmp_path / "second")
    assert len(list(entries.iterdir())) == 2
    template = tmp_path / "hub/chat_template.jinja"
    template.write_text(template.read_text().replace("| trim", "|trim"))
    prepare_text(from_hub, tmp_path / "third")
    assert len(list(entries.iterdir())) == 3
    file = "tokenizer/chat_template.jinja"
    assert (tmp_path / "second" / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
    assert (tmp_path / "third" / file).read_bytes() == template.read_bytes()


@pytest.mark.parametrize("changes", ["after a failure", "while it is copied"])
def test_a_tokenizer_that_changes_gives_other_runs_nothing(
    tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    from_hub = chats_of_a_model(tmp_path)
    template, settings = (
        tmp_path / "hub" / name for name in ("chat_template.jinja", "tokenizer_config.json")
    )
    text = template.read_text()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    def copy(paths: list[Path], folder: Path) -> None:
        template.write_text(text.replace("<|eot_id|>", "!<|eot_id|>"))
        copy_files(paths, folder)
        template.write_text(text)

    copy_files = language_model.copy_files
    with monkeypatch.context() as patch:
        if changes == "after a failure":
            patch.setattr(language_model, "chat_samples", fail)
            with pytest.raises(KeyboardInterrupt):
                prepare_text(from_hub, tmp_path / "run")
            template.unlink()  # it moves, with other text
            values = json.loads(settings.read_text()) | {"chat_template": text.replace("\n", " ")}
            settings.write_text(json.dumps(values))
            patch.undo()
        else:
            patch.setattr(language_model, "copy_files", copy)
        prepare_text(from_hub, tmp_path / "run")
    prepare_text(from_hub, tmp_path / "second")
    monkeypatch.setenv("LOCKSTEP_CACHE", "off")
    prepare_text(from_hub, tmp_path / "alone")
    assert content_of_folder(tmp_path / "second") == content_of_folder(tmp_path / "alone")


def test_the_standard_library_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/a.py").write_text("a = 1\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    data = DataOptions(kind="stdlib")
    first = content_of(data, NOT_SHARED.of)
    assert content_of(data, NOT_SHARED.of) == first
    (tmp_path / "lib/a.py").write_text("a = 2\n")
    assert content_of(data, NOT_SHARED.of) != first


def test_a_dataset_is_known_by_its_rows_and_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["one", "two"]}
    made = {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows)}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "first")
    made["test"] = datasets.Dataset.from_dict({"text": ["one", "six"]})
    datasets.DatasetDict(made).save_to_disk(tmp_path / "second")
    contents = [
        content_of(DataOptions(kind="huggingface", dataset=str(tmp_path / name)), NOT_SHARED.of)
        for name in ("first", "first", "second")
    ]
    assert contents[0] == contents[1]
    rows_of = [content["rows"] for content in contents if content]
    assert rows_of[0]["train"] == rows_of[2]["train"] and rows_of[0]["test"] != rows_of[2]["test"]


@pytest.mark.parametrize(
    "name", ["data/train.source.00000.ids", "data/prepared.json", "entry.json"]
)
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_entry_is_prepared_again(
    name: str, how: str, pairs: DataOptions, tmp_path: Path, entries: Path
) -> None:
    prepare(pairs, TOKENS, tmp_path / "first")
    whole = content_of_folder(tmp_path / "first")
    (entry,) = entries.iterdir()
    path = entry / name
    content = path.read_bytes()
    path.unlink()  # the first run has the same file
    if how != "missing":
        half = len(content) // 2
        end = content[half + 1 :] if how == "flipped" else b""
        path.write_bytes(content[:half] + bytes([content[half] ^ 1]) + end)
    for number in range(2):
        prepare(pairs, TOKENS, tmp_path / f"next-{number}")
        assert content_of_folder(tmp_path / f"next-{number}") == whole
        assert [path.name for path in entries.iterdir()] == [entry.name]
        assert content_of_folder(entry).keys() == {f"data/{name}" for name in whole} | {
            "entry.json"
        }


def test_a_file_outside_of_the_run_is_never_written(
    pairs: DataOptions, tmp_path: Path, entries: Path
) -> None:
    """Users may share a cache."""
    entry = first_entry(pairs, tmp_path, entries)
    (entry / "outside").write_text("bad")
    for name in ("data/../outside", "outside", "other/outside"):
        listed = {name: cache.NOT_SHARED.of([entry / "outside"])[entry / "outside"]}
        (entry / "other").mkdir(exist_ok=True)
        shutil.copy(entry / "outside", entry / "other/outside")
        (entry / "entry.json").write_text(json.dumps(cache.add_checksum({"files": listed})))
        assert not cache.take(entry, {"data": tmp_path / "run/data"})
        assert not list(tmp_path.glob("run/**/outside"))
        shutil.copytree(tmp_path / "first", entry / "data")
        (entry / "outside").write_text("bad")


@pytest.mark.parametrize("trouble", ["no folder", "full disk", "no home"])
def test_a_run_without_a_cache_prepares_its_data_with_at_most_one_warning(
    trouble: str,
    pairs: DataOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if trouble == "no folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    if trouble == "full disk":
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(cache, "link_or_copy", raising(full))
    if trouble == "no home":
        monkeypatch.delenv("LOCKSTEP_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", raising(RuntimeError("no home")))
    with caplog.at_level(logging.WARNING, "lockstep"):
        prepare(pairs, TOKENS, tmp_path / "run")
    open_prepared(tmp_path / "run")
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == (trouble != "no home")
    assert all("not cached for other runs" in message for message in warnings)
    assert not list(tmp_path.glob("cache/prepared/*")), "nothing is left of the attempt"


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_where_links_do_not_work_files_are_copied(
    pairs: DataOptions, tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", raising(OSError(errno.EXDEV, "Invalid cross-device link")))
    prepare(pairs, TOKENS, tmp_path / "first")
    fail_to_read(monkeypatch)
    prepare(pairs, TOKENS, tmp_path / "second")
    assert content_of_folder(tmp_path / "first") == content_of_folder(tmp_path / "second")
    (entry,) = entries.iterdir()
    copies = (entry / "data", tmp_path / "first", tmp_path / "second")
    assert len({(folder / "train.source.00000.ids").stat().st_ino for folder in copies}) == 3


def test_runs_that_prepare_at_once_leave_one_entry(tmp_path: Path, entries: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / f"run-{number}")])
        for number in range(3)
    ]
    assert [process.wait(100) for process in processes] == [0, 0, 0]
    (entry,) = entries.iterdir()
    first = content_of_folder(tmp_path / "run-0")
    assert all(content_of_folder(tmp_path / f"run-{number}") == first for number in (1, 2))
    assert content_of_folder(entry / "data") == first


def test_a_source_that_changes_meanwhile_is_not_kept(
    pairs: DataOptions, tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = encoded_pairs.read_corpus

    def read_and_edit(data: DataOptions) -> Any:
        corpus = read(data)
        with open(tmp_path / "pairs.tsv", "a") as file:
            file.write("more\tpiù\n")
        return corpus

    monkeypatch.setattr(encoded_pairs, "read_corpus", read_and_edit)
    prepare(pairs, TOKENS, tmp_path / "run")
    assert not entries.exists()


def test_a_source_that_vanishes_meanwhile_does_not_stop_the_run(
    pairs: DataOptions, tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = encoded_pairs.read_corpus

    def read_and_remove(data: DataOptions) -> Any:
        corpus = read(data)
        (tmp_path / "pairs.tsv").unlink()
        return corpus

    monkeypatch.setattr(encoded_pairs, "read_corpus", read_and_remove)
    prepare(pairs, TOKENS, tmp_path / "run")
    assert len(open_prepared(tmp_path / "run").train) > 2000 and not entries.exists()


def test_a_run_folder_that_cannot_be_written_keeps_the_entry(
    pairs: DataOptions, tmp_path: Path, entries: Path
) -> None:
    entry = first_entry(pairs, tmp_path, entries)
    (tmp_path / "file").write_text("")
    assert not cache.take(entry, {"data": tmp_path / "file" / "data"})
    assert cache.take(entry, {"data": tmp_path / "second"})
    assert content_of_folder(tmp_path / "second") == content_of_folder(tmp_path / "first")


def test_entries_that_no_run_uses_are_removed(
    pairs: DataOptions, tmp_path: Path, entries: Path
) -> None:
    ages = [
        (32 * "a", cache.UNUSED_S + 60),
        (f".{32 * 'a'}.ab12cd34", cache.UNUSED_S + 60),
        ("data-set-of-the-user", cache.UNUSED_S + 60),
        (32 * "b", 60.0),
    ]
    for name, age_s in ages:
        (entries / name).mkdir(parents=True)
        past_s = cache.time.time() - age_s
        os.utime(entries / name, (past_s, past_s))
    prepare(pairs, TOKENS, tmp_path / "run")
    names = {path.name for path in entries.iterdir()}
    kept = {"data-set-of-the-user", 32 * "b"}
    assert kept < names and len(names) == 3
    (entry,) = (path for path in entries.iterdir() if path.name not in kept)
    os.utime(entry, (past_s - 1e7, past_s - 1e7))
    prepare(pairs, TOKENS, tmp_path / "again")
    assert cache.time.time() - entry.stat().st_mtime < 60, "used now"


def test_a_run_from_the_cache_trains_the_same_bits(tmp_path: Path) -> None:
    values = ["--data.pairs", "600", "--data.held_out", "20", "--tokenizer.vocab_size", "400"]
    values += ["--steps", "2", "--workers", "2", "--evaluate.at_end", "0"]
    digests = []
    for name, folder in (("first", "cache"), ("second", "cache"), ("alone", "off")):
        place = str(tmp_path / folder) if folder != "off" else "off"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_CACHE": place}
        trained = run_lockstep("train", *values, "--out", tmp_path / name, env=env, check=True)
        assert ("as another run has prepared it" in trained.stderr) == (name == "second")
        digests.append(run_lockstep("checkpoint", "digest", tmp_path / name, check=True).stdout)
    assert digests[0] == digests[1] == digests[2]
