"""examples/spot.sh: a notice of the provider drains the host; without one the exit code passes through."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from support.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "examples" / "spot.sh"
AGENT = "trap 'exit 7' USR1; trap 'exit 75' TERM; touch ready; while :; do sleep 0.05; done"

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="no curl")


@contextmanager
def provider(answer: bytes, folder: Path, status: int = 200) -> Iterator[str]:
    """Serve `answer` once the agent is ready; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wait_until((folder / "ready").exists, "the agent", 20)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/notice"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def start(folder: Path, address: str, agent: str, **environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [SCRIPT, "bash", "-c", agent], cwd=folder, env={**os.environ, "NOTICE": address, **environ}
    )


@pytest.mark.parametrize(
    ("answer", "pattern"), [(b'{"action": "terminate"}', ""), (b"TRUE", "TRUE")]
)
def test_a_notice_sends_the_drain_signal(tmp_path: Path, answer: bytes, pattern: str) -> None:
    with provider(answer, tmp_path) as address:
        assert start(tmp_path, address, AGENT, NOTICE_TEXT=pattern).wait(20) == 7


@pytest.mark.parametrize(
    ("answer", "status", "pattern"), [(b"absent", 404, ""), (b"FALSE", 200, "TRUE")]
)
def test_without_a_notice_the_exit_code_of_the_agent_passes_through(
    tmp_path: Path, answer: bytes, status: int, pattern: str
) -> None:
    with provider(answer, tmp_path, status) as address:
        assert (
            start(tmp_path, address, "touch ready; sleep 0.3; exit 3", NOTICE_TEXT=pattern).wait(20)
            == 3
        )


def test_a_stop_signal_reaches_the_agent(tmp_path: Path) -> None:
    with provider(b"", tmp_path, 404) as address:
        process = start(tmp_path, address, AGENT)
        wait_until((tmp_path / "ready").exists, "the agent", 20)
        process.terminate()
        assert process.wait(20) == 75
