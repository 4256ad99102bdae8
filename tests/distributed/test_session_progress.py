"""What a Session tells: lines on the screen, metrics.jsonl, and the account of time across starts."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from support.launching import lockstep_command, one_thread, run_lockstep

from lockstep.elastic.control import run_status
from lockstep.record.events import read_events
from lockstep.record.metrics import iter_steps
from lockstep.record.progress import ProgressDisplay

LOOP = """
import time, torch, lockstep

def train(out: str, steps: int = 4, progress: float = 0.0, tokens: bool = False, shard: int = 1):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(40, 3), torch.zeros(40, 1))
    with lockstep.Session(out, micro_batches=4, progress=progress, shard=shard) as session:
        model, optimizer = session.prepare(model, optimizer)
        session.print("before", session.world.size)
        loader = session.loader(data, batch_size=8)

        def score(batch):
            time.sleep(0.2 * session.world.rank)  # rank 0 waits when the model is in shards
            return model(batch[0]).mean()

        for step in session.steps(steps):
            for x, y in loader(step):
                loss = torch.nn.functional.mse_loss(model(x), y, reduction="sum")
                if tokens:
                    session.backward(loss, count=7)
                else:
                    session.backward(loss)
                time.sleep(0.01)
            optimizer.step()
            session.log(step, accuracy=0.5, lr=0.1)
            session.evaluate(score, data)
            session.print("in step", step)
"""


def run(folder: Path, *flags: object, workers: int = 2) -> str:
    (folder / "loop.py").write_text(LOOP)
    words = ["launch", "--workers", workers, "--out", folder / "run"]
    words.append(f"{folder / 'loop.py'}:train")
    done = run_lockstep(*words, *flags, env=one_thread())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_screen_has_loss_rate_rest_and_what_the_loop_logs_and_prints_once(
    tmp_path: Path,
) -> None:
    lines = run(tmp_path).splitlines()
    assert lines[0] == "before 2"
    assert [line for line in lines if line.startswith("in step")] == [
        f"in step {step}" for step in range(4)
    ]
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 4
    for number, line in enumerate(steps, 1):
        shape = rf"step {number}/4  loss [\d.]+  accuracy 0.5  lr 0.1  samples/s +[\d.]+( k)?  (eta .+  )?exposed comm +\d+%  mem .+"
        assert re.fullmatch(shape, line), line


def test_waits_of_an_evaluation_are_no_communication_of_the_step(tmp_path: Path) -> None:
    run(tmp_path, "--shard", 2)
    lines = list(iter_steps(tmp_path / "run" / "metrics.jsonl"))
    assert max(line["overhead_seconds"] for line in lines) > 0.1  # of the 0.2 s that rank 0 waits
    for line in lines:
        assert line["communication_seconds"] + line["overhead_seconds"] < line["seconds"], line


def test_one_worker_has_no_communication(tmp_path: Path) -> None:
    screen = run(tmp_path, workers=1)
    for line in iter_steps(tmp_path / "run" / "metrics.jsonl"):
        assert line["communication_seconds"] == 0 and line["data_seconds"] > 0
    assert "exposed comm" not in screen


def test_a_terminal_shows_whole_lines_above_a_bar_while_a_worker_is_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    target, out = f"{tmp_path / 'loop.py'}:train", tmp_path / "run"
    words = ["launch", "--workers", "2", "--out", out, target, "--steps", "40"]
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    env = one_thread(TERM="xterm", COLUMNS="70")
    process = subprocess.Popen(
        lockstep_command(*words), stdin=slave, stdout=slave, stderr=slave, env=env
    )
    os.close(slave)
    shown, killed = b"", 0
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # EIO: closed by all processes
            break
        shown += part
        if not killed and re.search(rb"step +3/40", shown):
            killed = run_status(out)["members"][1]["pid"]
            os.kill(killed, signal.SIGKILL)
        if not part:
            break
    os.close(master)
    assert process.wait() == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[ml]|\x1b\[\?25h", "", shown.decode())
    # What a line of the screen has in the end: after it was erased or overwritten.
    lines = [re.split(r"\x1b\[2?K|\r", line.rstrip())[-1] for line in text.split("\n")]
    steps = [line for line in lines if re.match(r"step +\d+/40  loss", line)]
    assert len(steps) == 40 and len({line.index("loss") for line in steps}) == 1, shown
    assert max(map(len, steps)) <= 70
    assert all(
        re.search(r" (\d[\d.e-]*|[\d.]+( k)?|\d+ s|\d+%|\+\d more)$", line) for line in steps
    ), steps
    told = [f"slot 1 (pid {killed}): killed by SIGKILL; restarting now"]
    for line in lines:
        if "continuing with" in line:
            told.append(re.sub(r"^\S+/1|after .*", "", line))
    assert told[0] in lines
    assert told[1:] == [
        ": exited; continuing with 1 worker ",
        " joined; continuing with 2 workers ",
    ]
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l"), "the cursor stays hidden"


def test_metrics_have_the_rate_and_the_waits_of_each_step(tmp_path: Path) -> None:
    run(tmp_path)
    lines = list(iter_steps(tmp_path / "run" / "metrics.jsonl"))
    for line in lines:
        assert line["samples"] == 8 and line["workers"] == 2 and line["accuracy"] == 0.5
        assert line["overhead_seconds"] > 0 and line["data_seconds"] > 0
        assert line["overhead_seconds"] + line["data_seconds"] < line["seconds"]
        assert 0 <= line["exposed_communication"] < 1 and line["goodput"] > 0
    assert lines[-1]["samples_per_second"] == pytest.approx(
        8 * 3 / sum(line["seconds"] for line in lines[1:]), rel=1e-6
    ), "without the first step of a start"


def test_counts_of_the_loop_are_tokens(tmp_path: Path) -> None:
    out = run(tmp_path, "--tokens", "true")
    assert "tok/s" in out and "samples/s" not in out
    assert [line["tokens"] for line in iter_steps(tmp_path / "run" / "metrics.jsonl")] == [28] * 4


def test_a_resumed_run_continues_the_account_of_time(tmp_path: Path) -> None:
    run(tmp_path)
    first = [e for e in read_events(tmp_path / "run") if e["event"] == "goodput"][-1]
    run(tmp_path, "--steps", "6")
    second = [e for e in read_events(tmp_path / "run") if e["event"] == "goodput"][-1]
    assert second["training_s"] > first["training_s"] and second["starting_s"] > first["starting_s"]
    assert second["down_s"] > first["down_s"] == 0


def test_progress_false_prints_no_lines_but_those_of_the_loop(tmp_path: Path) -> None:
    lines = run(tmp_path, "--progress", "inf").splitlines()
    assert lines == ["before 2", *(f"in step {step}" for step in range(4))]


def test_lines_of_rank_0_are_printed_when_another_worker_shows_the_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After slot 0 is lost and replaced, rank 0 is another worker than the one that shows."""
    with ProgressDisplay(4, 0, lambda: False) as display:
        display.print_line("of the progress")
        display.print_line("of the loop", always=True)
        display.set_total(8)
    assert capsys.readouterr().out == "of the loop\n"
    assert display.total == 8
