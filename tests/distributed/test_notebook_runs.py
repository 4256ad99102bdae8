"""lockstep.launch in a real Jupyter kernel: the example notebook, an interrupt, a killed kernel."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hosts import living
from support.launching import ROOT, run_lockstep
from support.waiting import wait_until

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
jupyter_client = pytest.importorskip("jupyter_client.manager")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning"
)
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def output_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell["outputs"])


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))


def test_the_example_notebook_trains_the_same_bits_as_its_script_with_one_worker(
    tmp_path: Path,
) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    *_, launch, _, fell, digest = notebook["cells"]
    assert "generation 1: rank 0 of 2" in output_of(
        launch
    ) and "step 60: the loss fell from" in output_of(fell)
    script = tmp_path / "runs" / "notebook" / "notebook.py"
    done = run_lockstep(
        "run",
        "--workers",
        "1",
        "--out",
        tmp_path / "one",
        script,
        "--",
        "--out",
        tmp_path / "one",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    sha256 = re.compile(r"sha256 (\w{64})")
    here = sha256.search(output_of(digest))
    again = sha256.search(run_lockstep("checkpoint", "digest", tmp_path / "one").stdout)
    assert here and again and here[1] == again[1]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A Jupyter kernel in `tmp_path` that has run the cells before lockstep.launch."""
    manager, client = jupyter_client.start_new_kernel(cwd=str(tmp_path))
    for cell in nbformat.read(NOTEBOOK, as_version=4)["cells"][1:4]:
        client.execute_interactive(cell["source"], timeout=60, output_hook=lambda message: None)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    assert not living(tmp_path)


def output_until_idle(client: Any, request: str, timeout_s: float = 60) -> str:
    """Return the output and the errors of a cell after its end."""
    shown = []
    while True:
        message = client.get_iopub_msg(timeout=timeout_s)
        content = message["content"]
        if message["parent_header"].get("msg_id") == request:
            shown.append(content.get("text", "") or "\n".join(content.get("traceback", [])))
            if content.get("execution_state") == "idle":
                return "".join(shown)


@pytest.mark.long
def test_an_interrupt_saves_and_ends_the_workers_and_the_cell_resumes(
    tmp_path: Path, kernel: tuple[Any, Any]
) -> None:
    manager, client = kernel
    metrics = tmp_path / "runs" / "notebook" / "metrics.jsonl"
    client.execute_interactive("STEPS = 1_000_000", timeout=60)
    request = client.execute("lockstep.launch(main, workers=2)")
    wait_until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 10, "step 10")
    manager.interrupt_kernel()
    shown = output_until_idle(client, request)
    assert (
        "interrupted: the workers save" in shown
        and "the workers have ended (exit code 130)" in shown
    ), shown
    assert "KeyboardInterrupt" in shown and len(living(tmp_path)) == 1  # the kernel itself
    saved = len(metrics.read_bytes().splitlines())
    client.execute_interactive(f"STEPS = {saved + 5}", timeout=60)
    shown = output_until_idle(client, client.execute("lockstep.launch(main, workers=2)"))
    assert (
        f"resumes from step {saved}" in shown
        and len(metrics.read_bytes().splitlines()) == saved + 5
    ), shown


@pytest.mark.long
def test_the_workers_end_with_a_killed_kernel(tmp_path: Path, kernel: tuple[Any, Any]) -> None:
    manager, client = kernel
    metrics = tmp_path / "runs" / "notebook" / "metrics.jsonl"
    client.execute_interactive("STEPS = 1_000_000", timeout=60)
    client.execute("lockstep.launch(main, workers=2)")
    wait_until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 10, "step 10")
    manager.signal_kernel(signal.SIGKILL)
    wait_until(lambda: not living(tmp_path), "the end of the workers", 20)


@pytest.mark.long
def test_an_error_of_main_reaches_the_notebook(tmp_path: Path, kernel: tuple[Any, Any]) -> None:
    _, client = kernel
    shown = output_until_idle(
        client,
        client.execute("model = make_model()\ndef wrong():\n    model(1)\nlockstep.launch(wrong)"),
    )
    assert (
        "wrong uses the global model, of type Sequential" in shown and "create it in wrong" in shown
    ), shown
    shown = output_until_idle(
        client,
        client.execute(
            "def wrong():\n    raise ValueError('a fish')\nlockstep.launch(wrong, workers=1)"
        ),
    )
    assert "ValueError: a fish" in shown and "the run ended with exit code 1" in shown, shown
