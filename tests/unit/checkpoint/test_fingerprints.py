"""Facts of a checkpoint and run.json: compared, rebuilt, refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.fingerprints import (
    fingerprint_changes,
    make_run_id,
    newest_facts,
    read_run_id,
    tolerated_changes,
)
from lockstep.checkpoint.store import CheckpointStore
from lockstep.cli.main import main
from lockstep.config.resolve import resolve
from lockstep.config.rules import bit_deciding_values
from lockstep.config.saved_run import open_run, read_run, to_json, write_run
from lockstep.errors import CheckpointError, ConfigError

FACTS = {
    "run_id": "0123456789abcdef",
    "fingerprints": {"seed": "1", "corpus": "c" * 64, "asked": "x" * 200},
}


def test_changed_fingerprints_are_named_with_both_values() -> None:
    now = {
        "run_id": "fedcba9876543210",
        "fingerprints": {"seed": "2", "corpus": "d" * 64, "asked": "y" * 200, "new": "5"},
    }
    changes = fingerprint_changes(FACTS, now)
    assert (
        changes[0] == "run_id was 0123456789abcdef, is fedcba9876543210"
        and changes[1] == "seed was 1, is 2"
    )
    assert changes[2:] == [f"corpus was {'c' * 64}, is {'d' * 64}", "asked has changed"]
    assert fingerprint_changes(FACTS, FACTS) == [] and fingerprint_changes({}, now) == [], (
        "an earlier version stored no fingerprints"
    )


def test_other_machine_and_code_are_reported_and_not_refused() -> None:
    before = {
        "numerics": {"torch": "2.11", "threads": "1"},
        "code": {"own loop": "a.py, sources 1"},
        "flags": {"--lr": "0.1"},
    }
    now = {
        "numerics": {"torch": "2.13", "threads": "1"},
        "code": {"own loop": "a.py, sources 2"},
        "flags": {"--lr": "0.2"},
    }
    assert fingerprint_changes(before, now) == []
    assert tolerated_changes(before, now) == [
        "torch was 2.11, is 2.13",
        "own loop was a.py, sources 1, is a.py, sources 2",
        "--lr was 0.1, is 0.2",
    ]


def test_values_that_decide_bits_are_fingerprints_and_data_paths_are_not() -> None:
    first, second = (
        resolve(None, {"optim.learning_rate": rate, "data.kind": "files", "data.train": place})
        for rate, place in ((0.1, "a"), (0.2, "b"))
    )
    assert set(bit_deciding_values(first.run).items()) ^ set(
        bit_deciding_values(second.run).items()
    ) == {
        ("optim.learning_rate", "0.1"),
        ("optim.learning_rate", "0.2"),
    }


def test_an_edited_or_damaged_run_json_is_refused(tmp_path: Path) -> None:
    saved = resolve(None, {"seed": "3", "optim.learning_rate": "0.001"})
    write_run(tmp_path, saved)
    path = tmp_path / "run.json"
    content = path.read_bytes()
    assert read_run(tmp_path) == saved
    path.write_bytes(content.replace(b'"learning_rate": 0.001', b'"learning_rate": 0.002'))
    with pytest.raises(
        CheckpointError, match=r"run\.json is damaged or was edited.*its checksum does not fit"
    ) as caught:
        open_run(tmp_path, None, {}, {})
    assert caught.value.exit_code == 3 and caught.value.where and caught.value.hint
    for position in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            assert read_run(tmp_path) == saved, "white space"
        except CheckpointError as error:
            assert "is damaged or was edited" in str(error)


def test_missing_run_json_is_rebuilt_from_the_newest_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, store = resolve(None, {"seed": "3"}), CheckpointStore(tmp_path / "checkpoints")
    store.save(5, {"model.x": torch.zeros(1)}, {"run": to_json(resolve(None, {"seed": "2"}))})
    store.save(9, {"model.x": torch.ones(1)}, {"run": to_json(saved)})
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert open_run(tmp_path, None, {}, {}).run.seed == 3
    assert "run.json is missing: its values are taken from the checkpoint of step 9" in caplog.text
    with pytest.raises(ConfigError, match="holds another run: seed was 3, now 7"):
        open_run(tmp_path, None, {"seed": "7"}, {})
    facts = tmp_path / "checkpoints" / "step-00000009" / "facts.json"
    facts.write_bytes(facts.read_bytes().replace(b'"seed": 3', b'"seed": 4'))
    assert newest_facts(tmp_path / "checkpoints")[0] == 5, "a damaged one is skipped"  # type: ignore[index]


def test_same_files_from_another_folder_are_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    words = {"data.kind": "files", "data.test": ""}
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "texts", resolve(None, {**words, "data.train": "texts/a.tsv"}))
    (tmp_path / "texts" / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path / "texts")
    for spelled in ("a.tsv", str(tmp_path / "texts/a.tsv")):
        assert open_run(
            tmp_path / "texts", None, {**words, "data.train": spelled}, {}
        ).run.data.train == (spelled,)
    with pytest.raises(ConfigError, match=r"holds another run: data\.train was"):
        open_run(tmp_path / "texts", None, {**words, "data.train": "b.tsv"}, {})


def test_a_run_folder_has_one_id_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert read_run_id(tmp_path) == ""
    run_id = make_run_id(tmp_path, "")
    assert len(run_id) == 16 and make_run_id(tmp_path, "") == run_id == read_run_id(tmp_path)
    (tmp_path / "run_id.json").write_text('{"id": "mine"}')
    with pytest.raises(CheckpointError, match=r"run_id\.json is damaged"):
        read_run_id(tmp_path)
    (tmp_path / "run_id.json").unlink()
    assert make_run_id(tmp_path, "0123456789abcdef") == "0123456789abcdef", (
        "a lost one is taken from the newest checkpoint"
    )


def test_show_prints_overrides_from_the_resumed_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = resolve(None, {})
    write_run(tmp_path, run)
    for step in (5, 9):
        CheckpointStore(tmp_path / "checkpoints").save(
            step, {"model.x": torch.zeros(1)}, {"run": to_json(run)}
        )
    for resume, first in (("auto", 10), ("5", 6)):
        assert (
            main(
                [
                    "train",
                    "--out",
                    str(tmp_path),
                    "--show",
                    "--resume",
                    resume,
                    "--override",
                    "optim.learning_rate=1e-4",
                ]
            )
            == 0
        )
        assert capsys.readouterr().out.endswith(f"--override, from step {first} on\n")
