"""What a script with a mistake prints: three parts, or the frames of the user's program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import one_thread, run_command, run_lockstep

SCRIPT = """
import torch, lockstep


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return {samples}

    def __getitem__(self, i):
        if i == 7:
            raise TypeError("no sample 7")
        return torch.zeros(4)


def main():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.Session("run", micro_batches=2{options}) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(Squares(), batch_size=16)
        for step in session.steps(2):
            for x in loader(step):
                session.backward(model(x).mean())
            optimizer.step()


if __name__ == "__main__":
    {start}
"""
ALONE, LAUNCHED = "main()", "lockstep.launch(main, workers=2)"


def write(start: str, *, samples: int = 16, options: str = "") -> str:
    Path("script.py").write_text(SCRIPT.format(start=start, samples=samples, options=options))
    return "script.py"


def python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, env=one_thread(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("samples", "options", "what", "hint"),
    [
        (8, "", "batch_size=16 with micro_batches=2 and 8 samples", "at most the size of the"),
        (16, ", save_evry=5", "Session takes no save_evry", "save_every"),
    ],
    ids=["inside a Session", "before a Session"],
)
def test_an_error_of_lockstep_is_its_three_parts(
    samples: int, options: str, what: str, hint: str
) -> None:
    script = write(ALONE, samples=samples, options=options)
    done = python(script)
    assert done.returncode == 2
    first, _, last = done.stderr.splitlines()[-3:]
    assert first == f"UsageError: {what}" and hint in last
    if options:
        assert "Traceback" in python("-X", "dev", script).stderr


def files_in(trace: str) -> list[str]:
    lines = trace[trace.index("Traceback") :].splitlines()
    names = [Path(line.split('"')[1]).name for line in lines if line.startswith('  File "')]
    return names if any(line == "TypeError: no sample 7" for line in lines) else []


def test_an_error_of_the_user_has_the_frames_of_the_user() -> None:
    done = python(write(ALONE))
    assert done.returncode == 1 and files_in(done.stderr) == ["script.py"] * 3
    assert "rank0" not in done.stderr
    launched = run_command([sys.executable, write(LAUNCHED)])
    assert launched.returncode == 1 and files_in(launched.stderr) == ["script.py"] * 3
    log = next(path for path in Path("run/logs").iterdir() if "TypeError" in path.read_text())
    assert "loader.py" in files_in(log.read_text())


def test_a_script_that_trains_nothing_is_named() -> None:
    done = run_lockstep("run", "--workers", "2", write("pass"))
    assert done.returncode == 0
    assert done.stderr.count("script.py ended without opening a Session") == 1
    trained = run_lockstep("run", "--workers", "2", write(ALONE, samples=7))
    assert "without opening a Session" not in trained.stderr
