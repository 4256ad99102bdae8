"""The table of docs/features.md: each feature in an own loop, in shards and with learners has one
digest on any number of workers, killed and healed, and killed and resumed; or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fork_loop import LoopResult, run_loop
from support.launching import ROOT, one_thread, run_lockstep

from lockstep.checkpoint.commands import digest_line
from lockstep.record.events import read_events
from lockstep.record.metrics import iter_steps

LOOP = ROOT / "tests" / "support" / "loops" / "features.py"
FEATURES = [
    "plain",
    "bf16",
    "checkpointed",
    "compile",
    "average",
    "scores",
    "rollback",
    "mfu",
    "track",
    "muon",
    "profile",
]
OWN = {"learn": False}
LEARNERS = {"learn": True}
REFUSED = {
    ("rollback", "learners"): "on_divergence",
    ("rollback", "learners in shards"): "on_divergence",
    ("muon", "learners in shards"): "Muon needs whole tensors",
}
COLUMNS: dict[str, tuple[int, dict[str, Any]]] = {  # workers of a replica, flags of the loop
    "own loop": (1, OWN),
    "shards": (2, OWN),
    "learners": (1, LEARNERS),
    "learners in shards": (2, LEARNERS),
}


def train(folder: Path, workers: int, shard: int, **flags: Any) -> tuple[str, list[Any]]:
    """Return the digest of the run, and what its lines say that does not depend on time."""
    result = run_loop(LOOP, folder, workers, shard=shard, **flags)
    assert result == LoopResult(0, ""), result.text
    return outcome(folder)


def outcome(folder: Path) -> tuple[str, list[Any]]:
    names = ("step", "loss", "samples", "accuracy", "val_loss")
    lines = iter_steps(folder / "metrics.jsonl")
    return digest_line(folder), [[line.get(name) for name in names] for line in lines]


def train_healed(folder: Path, workers: int, shard: int, **flags: Any) -> tuple[str, list[Any]]:
    """Train with an agent; the worker in slot 1 kills itself, and is replaced."""
    folder.mkdir()
    (folder / "disturb").write_text(json.dumps({"kill": 3}))
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = ["run", "--workers", workers, "--layout.shard", shard, "--out", folder]
    done = run_lockstep(*command, LOOP, *words, env=one_thread())
    assert done.returncode == 0, done.stderr
    assert (folder / "killed").exists()
    regrouped = [event for event in read_events(folder) if event["event"] == "regrouped"]
    assert any(event.get("joined") for event in regrouped), regrouped
    return outcome(folder)


@pytest.mark.long
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("feature", FEATURES)
def test_one_result_or_a_refusal(
    feature: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, flags = COLUMNS[column]
    flags = {"feature": feature, **flags}
    if feature == "profile":
        monkeypatch.setenv("LOCKSTEP_PROFILE", "steps=3..4")  # reaches the runs with an agent
    if message := REFUSED.get((feature, column)):
        result = run_loop(LOOP, tmp_path, replica, shard=replica, **flags)
        assert result.code == 2 and message in result.text, result.text
        return
    alone = train(tmp_path / "1", 1, 1, **flags)
    for workers in {2, 3} if replica == 1 else {2}:
        assert train(tmp_path / f"{workers}", workers, replica, **flags) == alone
    assert train_healed(tmp_path / "healed", 2 * replica, replica, **flags) == alone
    killed = run_loop(LOOP, tmp_path / "killed", 2, shard=replica, kill_in=5, **flags)
    assert killed.code, "it was killed"
    assert train(tmp_path / "killed", 3, 1, **flags) == alone
    if feature == "profile":
        assert list((tmp_path / "healed" / "profile").glob("rank-0.*")), "a trace"
