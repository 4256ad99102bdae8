"""`lockstep watch`: what a frame has, and that a terminal is as before after it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import termios
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.checkpoints import save
from support.launching import lockstep_command, run_lockstep
from support.written_run import append_note, write_long_metrics, write_run_folder

from lockstep.cli.main import main
from lockstep.cli.watch import TAIL_BYTES, may_start, refresh, ssh_words
from lockstep.elastic.generation_log import Generation, GenerationLog, RunResult
from lockstep.record.events import append_event
from lockstep.report.curve import Curve
from lockstep.report.frame import frame, share_rows, sparkline
from lockstep.report.page import write_report
from lockstep.report.run_data import RunData

MEMBER = {
    "rank": 0,
    "host": "a",
    "slot": 1,
    "pid": 12,
    "role": "leader",
    "step": 61,
    "phase": "backward",
}
STATUS = {
    **{
        "run": "run",
        "generation": 3,
        "began_at_step": 38,
        "reason": "members change",
        "shares": [5, 3],
        "ended": None,
    },
    **{
        "members": [
            MEMBER,
            MEMBER | {"rank": 1, "host": "b", "phase": None, "unreachable": "timed out"},
        ],
        "waiting": [],
        "evaluators": [],
    },
}


def text_of(data: RunData, status: dict[str, Any], columns: int = 140, rows: int = 1000) -> str:
    console = Console(width=columns, file=StringIO())
    console.print(frame(data, status, console, rows))
    return console.file.getvalue()


def test_a_frame_has_workers_speed_generations_failures_and_progress(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path, 60)
    text = text_of(RunData(run, TAIL_BYTES).update(), STATUS)
    for words in (
        "2 workers on 2 hosts",
        "step 60 of 60",
        "tok/s 8.2 k",
        "exposed comm 20%",
        "shares 5+3",
        "checkpoint: none",
        "failures: 1",
    ):
        assert words in text, text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "generation 3, after step 38: members change; shares 5+3" in lines
    assert "0 a 1 12 leader 61 backward" in lines and "1 b 1 12 leader 61 timed out" in lines
    assert any(line.endswith("generation 2 2 workers after step 30: a/0: exited") for line in lines)
    assert any("worker ended a/0: killed by SIGKILL" in line for line in lines)


def test_the_total_of_a_start_gives_the_share_and_the_time_that_is_left(tmp_path: Path) -> None:
    write_long_metrics(tmp_path / "metrics.jsonl", 60)
    assert "\nstep 60\n" in text_of(RunData(tmp_path).update(), {})
    started = {"generation": 1, "step": 0, "workers": ["a/0/x"]}
    append_event(tmp_path, "began", **started, steps=80)
    text = text_of(RunData(tmp_path).update(), {})
    assert re.search(r"step 60 of 80 ━{30}─{10} 75%, about 10 s left\n", text), text
    append_event(tmp_path, "began", **started, steps=40)
    assert "\nstep 60\n" in text_of(RunData(tmp_path).update(), {}), "an earlier end"


def test_what_the_loop_logs_has_curves_before_what_is_measured(tmp_path: Path) -> None:
    write_long_metrics(tmp_path / "metrics.jsonl", 60, lambda step: {"accuracy": step / 100})
    text = text_of(RunData(tmp_path).update(), {})
    curves = [line.split()[0] for line in text.splitlines() if set(line) & set("▁█")]
    assert curves == ["loss", "norm", "lr", "accuracy", "tok/s", "exposed"]
    assert re.search(r"accuracy +▁+[▁-█]*█  0.6 *\n", text), text


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (80, 16), (60, 20), (200, 50)])
def test_a_frame_fits_the_screen_and_cuts_no_figure(
    tmp_path: Path, columns: int, rows: int
) -> None:
    run = write_run_folder(tmp_path, 60)
    for number in range(12):
        append_note(run, f"{'a long reason ' * 20}{number}")
    data = RunData(run, TAIL_BYTES).update()
    text = text_of(data, {**STATUS, "members": [MEMBER] * 30}, columns, rows)
    lines = text.splitlines()
    assert len(lines) <= rows and max(map(len, lines)) <= columns
    assert "tok/s 8.2 k  exposed comm 20%  mem 1.0 GiB" in text
    assert any(" ".join(line.split()) == "0 a 1 12 leader 61 backward" for line in lines)
    assert re.search(r"\n\d+ more workers", text) and "a long reason" in text
    assert "a long reason 11" not in text, "cut"


def test_rows_are_dealt_in_turn() -> None:
    assert share_rows(9, [2, 9, 9]) == [2, 4, 3]
    assert share_rows(99, [2, 9, 9]) == [2, 9, 9]
    assert share_rows(-3, [2, 9, 9]) == [0, 0, 0]


def test_a_curve_over_a_wide_range_is_drawn_as_logarithms() -> None:
    curve = Curve()
    for step, loss in enumerate((100.0, 10.0, 1.0, 0.1)):
        curve.add(step, loss)
    assert sparkline(curve, 4) == "█▅▃▁" and sparkline(curve, 2) == "█▁"


def test_a_frame_has_the_best_score_validation_curves_and_an_early_stop(tmp_path: Path) -> None:
    write_long_metrics(
        tmp_path / "metrics.jsonl", 60, lambda step: {"val_f1": 0.5} if step % 20 == 0 else {}
    )
    append_event(tmp_path, "best score", step=40, score=0.75)
    append_event(tmp_path, "stopped early", step=60, why="no score better than 0.75 in 3")
    text = text_of(RunData(tmp_path).update(), {})
    assert "best score: 0.75, step 40" in text
    assert "stopped early, no score better than 0.75 in 3" in text
    assert any(line.startswith("val_f1") for line in text.splitlines()), text


def test_missing_steps_are_named(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path, 60)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:10] + lines[13:40]))
    save(run / "checkpoints", 50)
    text = text_of(RunData(run).update(), {})
    assert (
        "metrics.jsonl: steps 11 to 13 are missing" in text
        and "metrics.jsonl: steps 41 to 50 are missing" in text
    )
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert (
        "metrics.jsonl: steps 11 to 13 are missing" in page
        and "metrics.jsonl: steps 41 to 50 are missing" in page
    )


@pytest.mark.parametrize("bytes_", [40_000, TAIL_BYTES])
def test_a_refresh_reads_only_the_tail_and_then_what_is_new(tmp_path: Path, bytes_: int) -> None:
    data = RunData(write_run_folder(tmp_path, 900), bytes_)
    assert refresh(data) == {} and data.steps.newest == 900
    read = data.steps.follower.bytes_read
    assert bytes_ - 1000 < read <= bytes_
    assert (
        refresh(data) == {}
        and data.steps.follower.bytes_read == read
        and data.steps.last["loss"] > 0
    )


def test_control_characters_of_a_folder_do_not_reach_the_terminal(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run\x1b[2J", 60)
    append_note(run, "killed \x1b]52;c;bHMgfg==\x07")
    status = {
        **STATUS,
        "run": str(run),
        "reason": "\x1b[2J",
        "members": [MEMBER | {"host": "\x9b2J", "phase": "\x1bc\ud800"}],
    }
    text = text_of(RunData(run, TAIL_BYTES).update(), status)
    assert not set("\x1b\x07\x9b\ud800") & set(text)
    assert "killed \ufffd]52;c;bHMgfg==\ufffd" in text
    (run / "generations").mkdir()
    reason = Generation(
        1, "t", (), "", 60, "the run ended", end=RunResult(4, "NaN\x1b]52;c;bHMgfg==\x07")
    )
    GenerationLog(run / "generations").propose(reason)
    for command in ("watch", "status"):
        done = run_lockstep(command, run)
        assert done.returncode == 0 and "NaN\ufffd]52;c" in done.stdout
        assert not set("\x1b\x07") & set(done.stdout + done.stderr)
    assert run_lockstep("report", run, "--out", tmp_path / "report.html").returncode == 0
    assert not set("\x1b\x07\x9b") & set((tmp_path / "report.html").read_text())


ODD_VALUES = {
    "400 digits": "9" * 400,
    "1e308": "1e308",
    "a lone surrogate": '"\\ud800"',
    "infinity": "1e999",
    "a list": "[]",
}


@pytest.mark.parametrize("odd", ODD_VALUES.values(), ids=ODD_VALUES.keys())
def test_odd_values_in_a_folder_are_skipped_or_shown(tmp_path: Path, odd: str) -> None:
    run = write_run_folder(tmp_path, 6)
    for name, key in (
        *(
            ("metrics.jsonl", "loss"),
            ("metrics.jsonl", "seconds"),
            ("metrics.jsonl", "step"),
            ("run.json", "steps"),
        ),
        *(
            ("events.jsonl", "step"),
            ("events.jsonl", "why"),
            ("events.jsonl", "training_s"),
            ("events.jsonl", "generation"),
        ),
    ):
        path, text = run / name, (run / name).read_text()
        changed = re.sub(
            rf'"{key}": ("[^"]*"|[^,}}\s]+)', lambda match, key=key: f'"{key}": {odd}', text
        )
        assert changed != text
        path.write_text(changed)
        data = RunData(run, TAIL_BYTES)
        text_of(data, refresh(data)).encode()
        write_report([run], tmp_path / "report.html")
        path.write_text(text)


def test_piped_output_is_one_plain_frame(tmp_path: Path) -> None:
    done = run_lockstep("watch", write_run_folder(tmp_path))
    assert (
        done.returncode == 0
        and "step 60 of 60" in done.stdout
        and "\x1b" not in done.stdout
        and not done.stderr
    )


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_clean_after_an_interrupt(tmp_path: Path, signal_: signal.Signals) -> None:
    run = write_run_folder(tmp_path)
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    # A background shell ignores SIGINT, and children inherit that.
    reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = lockstep_command("watch", run, "--every", "0.05s")
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, preexec_fn=reset)  # noqa: PLW1509  no thread holds a lock here
    output = b""
    while output.count(b"step 60 of 60") < 3:
        output += os.read(master, 1 << 16)
    assert b"\x1b[?1049h" in output  # the alternate screen
    process.send_signal(signal_)
    while (
        b"\x1b[?1049l" not in output
        or b"checkpoint: none" not in output.rpartition(b"\x1b[?1049l")[2]
    ):
        output += os.read(master, 1 << 16)
    assert process.wait(10) == 0 and output.rfind(b"\x1b[?25h") > output.rfind(b"\x1b[?25l"), (
        "the cursor stays hidden"
    )
    assert termios.tcgetattr(slave) == before and b"Traceback" not in output
    os.close(slave)
    os.close(master)


def test_a_finished_run_is_shown_once(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    (run / "generations").mkdir()
    GenerationLog(run / "generations").propose(
        Generation(1, "t", (), "", 60, "the run ended", end=RunResult(4, "the loss is NaN"))
    )
    done = run_lockstep("watch", run)
    assert done.returncode == 0 and "ended with exit code 4: the loss is NaN" in done.stdout


def test_a_stopped_run_has_no_failures(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    for code in (0, 75, 130):
        append_note(run, f"exited with code {code}")
    ended = {"ended": {"code": 130, "text": ""}, "members": []}
    text = text_of(RunData(run).update(), ended)
    assert text.startswith(str(run)) and "stopped with exit code 130\n" in text
    assert "exited with code" not in text and "left" not in text


def test_words_for_another_host() -> None:
    words = ssh_words("ada", "/runs/my run", 2.0, terminal=True)
    assert (
        words[:4] == ["ssh", "-t", "--", "ada"]
        and "exec lockstep watch '/runs/my run' --every 2;" in words[4]
    )
    assert "-t" not in ssh_words("ada", "/runs/a", 2.0, terminal=False)


def test_a_run_that_starts_later_is_awaited_unless_its_name_is_mistyped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "default1").mkdir()
    expected = {
        "default2": True,
        "other": True,
        "defualt1": False,
        "default1": False,
        "absent/other": False,
    }
    assert {name: may_start(tmp_path / name) for name in expected} == expected
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("lockstep.cli.watch.watch", lambda folder, every_s: None)
    monkeypatch.setattr(
        "time.sleep", lambda every_s: (tmp_path / "default2/generations").mkdir(parents=True)
    )
    assert main(["watch", str(tmp_path / "default2")]) == 0
    assert f"{tmp_path}/default2 does not exist yet: waiting" in capsys.readouterr().out
