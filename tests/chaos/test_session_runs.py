"""lockstep.Session with real workers: one sha256 through a kill, a stop and a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fork_loop import LoopResult, run_loop
from support.launching import TORCHRUN, one_thread, run_command
from support.launching import run_lockstep as lockstep

from lockstep.checkpoint.commands import digest_line
from lockstep.record import events, metrics

SCRIPT = Path(__file__).parents[1] / "support" / "loops" / "session.py"
STEPS = 40


@pytest.fixture(autouse=True)
def separate_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))


def train(folder: Path, workers: int, **flags: Any) -> subprocess.CompletedProcess[str]:
    words = [f"--{name}={value}" for name, value in flags.items()]
    return lockstep("train", f"{SCRIPT}:train", "--out", folder, "--workers", str(workers), *words)


def lines_of(folder: Path) -> list[tuple[int, float, float, float | None]]:
    """Return (step, loss, norm, error) of each line of metrics.jsonl."""
    return [
        (line["step"], line["loss"], line["norm"], line.get("error"))
        for line in metrics.iter_steps(folder / "metrics.jsonl")
    ]


def test_same_sha256_and_metrics_on_1_and_2_workers_through_a_kill_a_stop_and_a_resume(
    tmp_path: Path,
) -> None:
    alone, two, disturbed = (tmp_path / name for name in ("alone", "two", "disturbed"))
    assert run_loop(SCRIPT, alone, 1) == LoopResult(0, "")
    result = train(two, 2, num_workers=2)
    assert result.returncode == 0, result.stderr
    disturbed.mkdir()
    (disturbed / "disturb").write_text(json.dumps({"kill": 13, "stop": 25}))
    stopped = train(disturbed, 3, num_workers=1)
    assert stopped.returncode == 75, stopped.stderr
    assert digest_line(disturbed).startswith("step 26 "), (
        "the step with the signal was committed and saved"
    )
    assert any(
        event.get("joined")
        for event in events.read_events(disturbed)
        if event["event"] == "regrouped"
    ), "a worker was replaced in place"
    assert run_loop(SCRIPT, disturbed, 2) == LoopResult(0, "")
    digests = {digest_line(folder) for folder in (alone, two, disturbed)}
    assert len(digests) == 1 and digests.pop().startswith(f"step {STEPS} sha256 ")
    assert lines_of(alone) == lines_of(two) == lines_of(disturbed) and len(lines_of(alone)) == STEPS
    assert [error is not None for *_, error in lines_of(alone)] == [
        step % 10 == 0 for step in range(1, STEPS + 1)
    ]


def test_session_in_another_folder_than_its_run_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.py"
    loop.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\nimport session\ndef main(): session.train('elsewhere', 2)\n"
    )
    result = lockstep("train", f"{loop}:main", "--out", tmp_path / "run", "--workers", "1")
    assert (
        result.returncode == 2
        and f"this Session's folder is elsewhere, the run's is {tmp_path / 'run'}" in result.stderr
    ), result.stderr


IMPORT_FAILS = """
import json, os
from lockstep import Session

if json.loads(os.environ["LOCKSTEP_WORKER_ENV"])["slot"] == 1:
    from collections import OrderedDit
with Session(os.environ["RUN"], micro_batches=2):
    pass
"""


def test_worker_whose_script_fails_before_its_session_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    loop = tmp_path / "loop.py"
    loop.write_text(IMPORT_FAILS)
    result = lockstep("run", "--workers", "2", "--out", tmp_path / "run", loop)
    assert (
        result.returncode == 1 and "ImportError: cannot import name 'OrderedDit'" in result.stderr
    ), result.stderr
    assert "failed before it joined the run, and would fail again: ImportError" in result.stderr, (
        result.stderr
    )
    started = [
        event["slot"]
        for event in events.read_events(tmp_path / "run")
        if event["event"] == "worker started"
    ]
    assert sorted(started) == [0, 1], result.stderr


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the script with 12 steps on one worker."""
    folder = tmp_path_factory.mktemp("one") / "run"
    assert run_loop(SCRIPT, folder, 1, steps=12) == LoopResult(0, "")
    return digest_line(folder)


STARTS = {
    "run": ["-m", "lockstep", "run", SCRIPT, "--workers", "3", "--steps", "12"],
    "launch": ["-m", "lockstep", "launch", SCRIPT, "--workers", "2", "--steps=12"],
    "python": [SCRIPT, "--steps", "12"],
    "module": ["-m", "session", "--steps", "12"],
    "torchrun": [*TORCHRUN[1:], SCRIPT, "--steps", "12"],
}


@pytest.mark.parametrize("start", STARTS)
def test_each_way_to_start_a_script_gives_the_same_sha256(
    start: str, digest: str, tmp_path: Path
) -> None:
    command = [sys.executable, *map(str, STARTS[start])]
    # With another PYTHONPATH the processes are not forked but import torch.
    environ = one_thread(**({"PYTHONPATH": str(SCRIPT.parent)} if start == "module" else {}))
    result = run_command(command, env=environ, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert digest_line(tmp_path / "runs" / "session") == digest
    sizes = [
        line["workers"]
        for line in metrics.iter_steps(tmp_path / "runs" / "session" / "metrics.jsonl")
    ]
    assert sizes == [3 if start == "run" else 2] * 12


def test_worker_of_a_script_is_replaced_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "disturb").write_text(json.dumps({"kill": 5, "stop": 20}))
    result = lockstep("run", "--out", folder, SCRIPT, "--workers", "3")
    assert result.returncode == 75, result.stderr
    assert any(
        event.get("joined") for event in events.read_events(folder) if event["event"] == "regrouped"
    )


# A command whose loop is in a module beside it, and its folder an argument.
PACKAGE = {
    "jobs/__init__.py": "",
    "jobs/train.py": """from pathlib import Path
import click
from .loops import train
@click.command()
@click.argument("folder")
def main(folder):
    Path("runs/train/of-user").mkdir(parents=True, exist_ok=True)
    train(folder)
main()
""",
    "jobs/loops.py": f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nfrom session import train\n",
}


@pytest.mark.parametrize("is_named", [False, pytest.param(True, marks=pytest.mark.long)])
def test_run_follows_the_session_of_an_imported_module(is_named: bool, tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if is_named:
        (tmp_path / "jobs/loops.py").write_text(
            PACKAGE["jobs/loops.py"] + "from lockstep import Session\nSession\n"
        )
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "disturb").write_text(json.dumps({"kill": 5, "stop": 20}))
    result = lockstep("run", "--workers", "3", "-m", "jobs.train", folder, cwd=tmp_path)
    assert result.returncode == 75, result.stderr
    assert (
        f"opens a Session in {folder}; starting again: lockstep run --restart one --out '{folder}'"
        in result.stderr
    )
    assert any(
        event.get("joined") for event in events.read_events(folder) if event["event"] == "regrouped"
    )
    left = [path.name for path in (tmp_path / "runs" / "train").iterdir()]
    assert left == ["of-user"], "only what the script wrote is left of the first start"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "missing.py"], "there is no file missing.py"),
        (["run", "run.toml"], "'run.toml' is no script"),
        (["run", "torn.py"], "torn.py is not Python"),
        (["train", "torn.py"], "'torn.py' names no function"),
        (["run", SCRIPT, "--stepz", "3"], "train takes no --stepz"),
    ],
)
def test_script_that_cannot_run_is_refused(
    words: list[str | Path], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.py").write_text("def\n")
    result = lockstep(*words)
    assert result.returncode == 2 and message in result.stderr, result.stderr


TWO_SESSIONS = SCRIPT.with_name("two_sessions.py")


@pytest.mark.parametrize("case", ["second", pytest.param("folds", marks=pytest.mark.long)])
def test_second_session_under_an_agent_is_refused(case: str, tmp_path: Path) -> None:
    first, second = {"second": ("run", "run"), "folds": ("run/0", "run/1")}[case]
    result = lockstep(
        "run", TWO_SESSIONS, "--workers", "1", "--", "--case", case, "--out", "run", cwd=tmp_path
    )
    assert digest_line(tmp_path / first).startswith("step 2 ")
    assert (
        result.returncode == 2
        and "UsageError: an agent runs one Session per start" in result.stderr
    ), result.stderr
    assert f"lockstep run --out {second} FILE.py ..., or start it with torchrun" in result.stderr


def test_sessions_follow_each_other_under_torchrun(tmp_path: Path) -> None:
    words = [*TORCHRUN, str(TWO_SESSIONS), "--out", str(tmp_path / "two"), "--case", "folds"]
    result = run_command(words)
    assert result.returncode == 0, result.stderr
    assert run_loop(TWO_SESSIONS, tmp_path / "one", 1, case="folds") == LoopResult(0, "")
    digests = [[digest_line(tmp_path / run / fold) for fold in "01"] for run in ("one", "two")]
    assert digests[0] == digests[1] and len(set(digests[0])) == 2


def test_folder_with_the_rank_is_refused_under_torchrun(tmp_path: Path) -> None:
    result = run_loop(TWO_SESSIONS, tmp_path / "run", 2, case="rank")
    assert (
        f"the Session's folder differs: {tmp_path}/run-0 on rank 0, {tmp_path}/run-1 on rank 1"
        in result.text
    ), result


def test_wrong_loop_that_one_worker_notices_ends_the_run_on_all(tmp_path: Path) -> None:
    loop = (f"{SCRIPT.with_name('habits.py')}:train", "--habit", "dataloader")
    result = lockstep("train", "--out", tmp_path / "run", "--workers", "2", *loop)
    assert result.returncode == 2 and "the loss of micro-batch 0 of step 1 is" in result.stderr, (
        result.stderr
    )
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
