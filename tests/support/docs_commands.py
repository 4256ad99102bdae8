"""The console commands of a page of docs/, run as a reader would run them.

$ lockstep ...                            the lines below it are its output; "..." is any text
lockstep ...    # exit code 75            by default 0
lockstep ...    # in another terminal     while the command above it runs
lockstep ...    # on a cluster            not here; "on this machine" is here
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from support.hosts import SUBNET
from support.launching import ROOT, one_thread
from support.waiting import wait_until

OPTIONAL = {"with_fabric": "lightning_fabric", "sft.py": "trl"}  # packages of a command's script


@dataclass(frozen=True)
class Command:
    text: str
    code: int
    is_beside: bool  # runs in another terminal
    is_elsewhere: bool  # needs other machines
    output: tuple[str, ...] | None  # as on the page; None: not shown

    @property
    def runs_here(self) -> bool:
        """Whether the test runs it. Commands that install are not run, and other tests."""
        installs = self.text.startswith(("pip ", "git "))
        return not (self.is_elsewhere or installs or "pytest " in self.text)


def pages() -> list[str]:
    """Return the pages of all sections, as mkdocs.yml lists them."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r"^      - .*: (\S+\.md)$", nav, re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def commands_of(page: str) -> list[Command]:
    text = text_of(page).replace("\\\n", " ")
    commands: list[Command] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        shows_output = block.startswith("$ ")
        for part in (
            re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
            if shows_output
            else filter(None, block.splitlines())
        ):
            line, *output = part.splitlines()
            words, _, comment = line.partition("  # ")
            code = re.search(r"exit code (\d+)", comment)
            commands.append(
                Command(
                    words.strip(),
                    int(code[1]) if code else 0,
                    "in another terminal" in comment,
                    comment.startswith("on ") and "on this machine" not in comment,
                    tuple(output) if output else None,
                )
            )
    return commands


def make_folder(folder: Path) -> None:
    """Put what the pages name into `folder`: the examples, the recipes, a script, a run file, a list
    of one host, chats."""
    for name in ("examples", "recipes"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs")
        )
    script = (ROOT / "examples" / "own_loop.py").read_text()
    plan = ', tensor_plan={"0": "colwise", "3": "rowwise"})'
    script = script.replace(
        "steps: int = 200) -> None:\n    dataset", "steps: int = 1500) -> None:\n    dataset"
    )
    (folder / "train.py").write_text(
        script.replace(
            "(model, optimizer)\n        loader", f"(model, optimizer{plan}\n        loader"
        )
    )
    recipe = (ROOT / "recipes" / "llama-pretrain.toml").read_text()
    for given, small in (
        ("steps = 3800", "steps = 20"),
        ("micro_batches = 2", "micro_batches = 4"),
    ):
        recipe = recipe.replace(given, small)
    (folder / "run.toml").write_text(f"{recipe}\n[evaluate]\nat_end = 0\n")
    if not (folder / "hosts.toml").exists():
        (folder / "hosts.toml").write_text(
            f'[[host]]\nname = "{socket.gethostname()}"\naddress = "127.0.0.1"\nworkers = 2\n'
        )
    chat = '{"messages": [{"role": "user", "content": "What is %d?"}, {"role": "assistant", "content": "%d."}]}\n'
    (folder / "chats.jsonl").write_text("".join(chat % (number, number) for number in range(200)))


def run_page(page: str, folder: Path, enter: Sequence[str] = ()) -> None:
    """Run the commands of a page in `folder`; `enter` is the prefix of commands that run on a host.
    Commands whose package is not installed are skipped. A block of Python that begins with the
    comment `# NAME.py` becomes this file."""
    files = re.findall(
        r"^```python\n# (\S+\.py)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL
    )
    for name, script in files:
        (folder / name).write_text(script)
    missing = [name for name, package in OPTIONAL.items() if not find_spec(package)]
    commands = [
        command
        for command in commands_of(page)
        if command.runs_here and not any(name in command.text for name in missing)
    ]
    while commands:
        command = commands.pop(0)
        trains = partial(has_steps, folder, time.time())
        process = start(command, folder, enter)
        try:
            for other in takewhile(lambda following: following.is_beside, list(commands)):
                wait_until(trains, f"a step of {command.text}", 100, process=process)
                finish(other, start(other, folder, enter))
                commands.remove(other)
            finish(command, process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def start(command: Command, folder: Path, enter: Sequence[str]) -> subprocess.Popen[str]:
    words = command.text.replace("/shared/", f"{folder}/shared/").replace("10.0.0.", SUBNET)
    environ = one_thread(
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", LOCKSTEP_TMP=str(folder)
    )
    return subprocess.Popen(
        [*enter, "bash", "-c", words],
        cwd=folder,
        env=environ,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def has_steps(folder: Path, since: float) -> bool:
    """Whether a run in `folder` has committed steps after the time `since`, in seconds, or a
    Trainer has saved one."""
    files = [*folder.glob("runs/*/metrics.jsonl"), *folder.glob("shared/runs/*/metrics.jsonl")]
    newer = [file for file in files if file.stat().st_mtime > since]
    saved = any(folder.glob("runs/*/checkpoint-*/COMPLETE"))
    return saved or any(file.read_text().count("\n") >= 3 for file in newer)


def finish(command: Command, process: subprocess.Popen[str]) -> None:
    answer = "continue\n" if "--debug" in command.text else ""  # to pdb
    output, _ = process.communicate(answer, timeout=900)
    assert process.returncode == command.code, (
        f"{command.text}: exit code {process.returncode}, not {command.code}\n{output}"
    )
    if command.output is not None:
        assert matches(command.output, output), f"{command.text}\n{output}"


def matches(shown: Sequence[str], output: str) -> bool:
    """Whether `output` is what a page shows, where "..." alone is any number of lines, and within a line any text."""
    lines = [
        "(?:.*\n)*" if line == "..." else re.escape(line.rstrip()).replace(r"\.\.\.", ".*") + " *\n"
        for line in shown
        if line.strip()
    ]
    return re.fullmatch("".join(lines), re.sub(r"\n\s*\n", "\n", output.lstrip("\n"))) is not None
