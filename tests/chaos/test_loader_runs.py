"""Loaders of a Session with real workers: one sha256 on 1, 2 and 3, through a kill and a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fork_loop import LoopResult, run_loop
from support.launching import ROOT, run_lockstep

from lockstep.checkpoint.commands import digest_line
from lockstep.record import events

SCRIPT = ROOT / "tests" / "support" / "loops" / "loaders.py"


@pytest.fixture(autouse=True)
def temporary_folder_of_lockstep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))


def train(folder: Path, workers: int, kind: str, **flags: object) -> tuple[int, str]:
    words = [f"--{name}={value}" for name, value in {"kind": kind, **flags}.items()]
    result = run_lockstep("run", SCRIPT, "--workers", workers, "--out", folder, *words)
    return result.returncode, result.stderr


@pytest.mark.parametrize("kind", [pytest.param("tokens", marks=pytest.mark.long), "mixture"])
def test_one_sha256_on_1_2_and_3_workers_killed_stopped_in_a_stage_and_resumed(
    kind: str, tmp_path: Path
) -> None:
    assert run_loop(SCRIPT, tmp_path / "1", 1, kind=kind) == LoopResult(0, "")
    assert run_loop(SCRIPT, tmp_path / "2", 2, kind=kind) == LoopResult(0, "")
    disturbed = tmp_path / "disturbed"
    disturbed.mkdir()
    (disturbed / "disturb").write_text(json.dumps({"kill": 5, "stop": 14}))
    code, errors = train(disturbed, 3, kind, num_workers=2)
    assert code == 75, errors
    assert digest_line(disturbed).startswith("step 15 "), (
        "in the middle of the second stage of the mixture"
    )
    assert any(event["event"] == "regrouped" for event in events.read_events(disturbed)), (
        "a worker was lost"
    )
    assert run_loop(SCRIPT, disturbed, 1, kind=kind) == LoopResult(0, "")
    digests = {digest_line(tmp_path / name) for name in ("1", "2", "disturbed")}
    assert len(digests) == 1 and digests.pop().startswith("step 24 sha256 ")


def test_rows_of_a_stream_written_once_train_as_the_rows_themselves(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for kind, workers in (("indexed", 3), ("indexed", 1), ("rows", 2), ("streamed", 2)):
        assert run_loop(
            SCRIPT, tmp_path / f"{kind}{workers}", workers, kind=kind, steps=6
        ) == LoopResult(0, "")
    assert (
        len(
            {
                digest_line(tmp_path / name)
                for name in ("indexed3", "indexed1", "rows2", "streamed2")
            }
        )
        == 1
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_a_mean_over_unequal_micro_batches_is_refused_on_any_number_of_workers(
    workers: int, tmp_path: Path
) -> None:
    result = run_loop(SCRIPT, tmp_path / "run", workers, kind="dropping", micro_batches=3)
    assert (
        result.code == 2
        and "the micro-batches of a step have 4 to 8 samples, and their losses are means"
        in result.text
    ), result
    assert "session.backward(loss_sum, count=n)" in result.text
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")], "before the first update"
