"""Record docs/killed-worker.svg: a run on three workers, one of them killed, and the same run
undisturbed on one worker.

    .venv/bin/python tools/record_terminal.py [FILE.svg]

Starts every command for real in a temporary folder that holds examples/own_loop.py, and draws what
the commands print, each line with the seconds since the start. Nothing is edited except that the
animation shortens pauses to `LONGEST_PAUSE_S`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from threading import Thread

TOP = Path(__file__).parents[1]
STEPS, KILL_AT_STEP, KILLED_SLOT = 400, 180, 1
TRAIN = f"lockstep run own_loop.py --workers 3 --steps {STEPS} --out runs/killed"
TRAIN_ALONE = f"lockstep run own_loop.py --workers 1 --steps {STEPS} --out runs/alone"
DIGEST = "lockstep checkpoint digest runs/{}"
COLUMNS, LONGEST_PAUSE_S = 102, 1.5
FONT_PX, LINE_PX, MARGIN_PX, CLOCK_PX = 13, 19, 14, 66


@dataclass
class Recording:
    """Lines of one terminal: seconds since the start, kind (command, kill, output), text."""

    folder: Path
    start_s: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        self.lines.append((time.monotonic() - self.start_s, kind, text))

    def start(self, command: str) -> tuple[subprocess.Popen[str], Thread]:
        """Start `command`; a thread records what it prints."""
        self.add("command", f"$ {command}")
        environ = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            shlex.split(command),
            cwd=self.folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        reader = Thread(target=self.read, args=(process.stdout,))
        reader.start()
        return process, reader

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.add("output", line.rstrip())

    def run(self, command: str) -> None:
        self.finish(*self.start(command))

    def finish(self, process: subprocess.Popen[str], reader: Thread) -> None:
        code = process.wait()
        reader.join()
        if code:
            raise SystemExit("\n".join([*(text for _, _, text in self.lines), f"exit code {code}"]))


def record(folder: Path) -> Recording:
    shutil.copy(TOP / "examples" / "own_loop.py", folder)
    recording = Recording(folder)
    process, reader = recording.start(TRAIN)
    run = folder / "runs" / "killed"
    wait_for_step(run, KILL_AT_STEP, process)
    pid = pid_of_slot(run, KILLED_SLOT)
    recording.add("kill", f"$ kill -9 {pid}    # in another terminal: worker {KILLED_SLOT}")
    subprocess.run(["kill", "-9", str(pid)], check=True)
    recording.finish(process, reader)
    recording.run(DIGEST.format("killed"))
    recording.run(TRAIN_ALONE)
    recording.run(DIGEST.format("alone"))
    return recording


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        lines = (
            (run / "metrics.jsonl").read_text().splitlines()
            if (run / "metrics.jsonl").exists()
            else []
        )
        if len(lines) >= step:
            return
        time.sleep(0.005)


def pid_of_slot(run: Path, slot: int) -> int:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return int(
        next(
            event["pid"]
            for event in events
            if event["event"] == "worker started" and event["slot"] == slot
        )
    )


def draw(lines: list[tuple[float, str, str]]) -> str:
    """Return an SVG in which each line appears at its time; FILE.svg#end shows the last frame."""
    rows: list[str] = []
    shown_s = previous_s = 0.0
    for second, kind, text in lines:
        shown_s += min(second - previous_s, LONGEST_PAUSE_S)
        previous_s = second
        for number, part in enumerate(textwrap.wrap(text, COLUMNS, break_on_hyphens=False) or [""]):
            place = (
                f'y="{MARGIN_PX + LINE_PX * (len(rows) + 1)}" '
                f'style="animation-delay:{shown_s:.2f}s"'
            )
            clock = (
                f'<text class="clock" x="{MARGIN_PX}" {place}>{second:.2f} s</text>'
                if not number
                else ""
            )
            rows.append(
                f'{clock}<text class="{kind}" '
                f'x="{MARGIN_PX + CLOCK_PX}" {place}>{escape(part)}</text>'
            )
    width, height = (
        int(MARGIN_PX * 2 + CLOCK_PX + COLUMNS * FONT_PX * 0.602),
        MARGIN_PX * 2 + LINE_PX * len(rows),
    )
    style = (
        f"text{{font:{FONT_PX}px 'DejaVu Sans Mono',ui-monospace,Menlo,Consolas,monospace;"
        "white-space:pre;animation:appear 1ms both}"
        "@keyframes appear{from{opacity:0}to{opacity:1}}"
        "@media(prefers-reduced-motion){text{animation:none}}"
        "svg:target text{animation:none}"
        ".clock{fill:#909dab}.output{fill:#cdd9e5}.command{fill:#6cb6ff}"
        ".kill{fill:#ff938a;font-weight:bold}"
    )
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" id="end" '
            f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            "<title>A run on three workers, "
            "one of them killed, ends with the digest of an undisturbed run on one worker</title>",
            f'<style>{style}</style><rect width="100%" height="100%" rx="6" fill="#22272e"/>',
            *rows,
            "</svg>\n",
        ]
    )


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) if arguments else TOP / "docs" / "killed-worker.svg"
    with tempfile.TemporaryDirectory() as folder:
        recording = record(Path(folder))
    path.write_text(draw(recording.lines))
    print("\n".join(f"{second:5.2f} s  {text}" for second, _, text in recording.lines))
    print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
