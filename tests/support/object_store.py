"""A real S3 server (moto) and a proxy before it that injects faults."""

from __future__ import annotations

import hashlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from support.launching import one_thread, run_lockstep, start_lockstep
from support.processes import SUPPORT, processes_in
from support.waiting import wait_until

from lockstep.object_store.address import parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import Snapshot, newest

SERVER = "import sys; from moto.server import main; main(['-H', sys.argv[1], '-p', sys.argv[2]])"
REQUEST = "import sys; from urllib.request import *; urlopen(Request(sys.argv[1], method=sys.argv[2]), timeout=5)"
Fault = Callable[
    [str, str], str
]  # (method, path) -> "", "slow", "torn", "cut", "lost", "swallowed" or one of REFUSALS
REFUSALS = {
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "denied": (403, "AccessDenied", "Access Denied"),
    "skewed": (
        403,
        "RequestTimeTooSkewed",
        "The difference between the request time and the current time is too large.",
    ),
}


def free_port() -> int:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return int(server.server_address[1])


@contextmanager
def s3_server(host: str = "127.0.0.1", enter: Sequence[str] = ()) -> Iterator[str]:
    """Run moto's HTTP server with the bucket `runs`; yield its address. enter: prefix of commands
    in its network namespace.
    """
    port = free_port()
    command = [*enter, sys.executable, "-c", SERVER, host, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://{host}:{port}"
        wait_until(
            lambda: send(f"{address}/moto-api/", "GET", enter), "an answer of moto", process=process
        )
        make_bucket(address, enter)
        yield address
    finally:
        process.terminate()
        process.wait()


def send(url: str, method: str, enter: Sequence[str] = ()) -> bool:
    """Send a request without a body; return whether it was answered without an error."""
    if enter:
        return not subprocess.run(
            [*enter, sys.executable, "-c", REQUEST, url, method],
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode
    with suppress(OSError):
        return bool(
            urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5).status
        )
    return False


def make_bucket(address: str, enter: Sequence[str] = ()) -> None:
    """Create the bucket `runs`, and empty everything else that the server holds."""
    assert send(f"{address}/moto-api/reset", "POST", enter) and send(
        f"{address}/runs", "PUT", enter
    )


def environment(address: str, copies: object) -> dict[str, str]:
    """Return the variables with which obstore reaches the server."""
    keys = {
        "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
        "AWS_SECRET_ACCESS_KEY": "very-secret-value",
        "AWS_REGION": "us-east-1",
    }
    return {
        **keys,
        "AWS_ENDPOINT_URL": address,
        "LOCKSTEP_STORE_CACHE": str(copies),
        "LOCKSTEP_STORE_BEAT_S": "0.5",
    }


@contextmanager
def reached_at(address: str, copies: object) -> Iterator[None]:
    with mock.patch.dict(os.environ, environment(address, copies)):
        yield


class Proxy:
    """Forwards HTTP requests to `server`; `fault` decides what goes wrong with each.

    503   the reply of an overloaded store, without forwarding; likewise the others of REFUSALS
    slow  forwards after 0.1 s
    torn  forwards half of the body, as if it were all, and passes the reply on
    cut   closes the connection without forwarding
    lost  forwards, and closes the connection without a reply
    swallowed  replies as if the object had been stored, without forwarding
    """

    def __init__(self, server: str) -> None:
        self.server, self.fault, self.faults = server, no_fault, list[tuple[str, str, str]]()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.fault(self.command, self.path)
                if fault:
                    proxy.faults.append((fault, self.command, self.path))
                if fault in REFUSALS:
                    status, code, message = REFUSALS[fault]
                    self.reply(
                        status,
                        f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode(),
                        {},
                    )
                    return
                if fault == "swallowed":
                    self.reply(
                        200,
                        b"",
                        {"ETag": f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'},
                    )
                    return
                if fault == "slow":
                    time.sleep(0.1)
                if fault != "cut":
                    status, headers, content = proxy.forward(
                        self.command,
                        self.path,
                        body[: len(body) // 2] if fault == "torn" else body,
                        self.headers,
                    )
                if fault in ("cut", "lost"):
                    self.close_connection = True
                    return
                self.reply(status, content, headers)

            def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in (
                        "content-length",
                        "transfer-encoding",
                        "connection",
                        "date",
                        "server",
                    ):
                        self.send_header(name, value)
                self.send_header(
                    "Content-Length",
                    headers.get("Content-Length", "0")
                    if self.command == "HEAD"
                    else str(len(content)),
                )
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"

    def forward(
        self, method: str, path: str, body: bytes, headers: http.client.HTTPMessage
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.removeprefix("http://"))
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() not in ("content-length", "connection")
        }
        connection.request(method, path, body, kept)
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        return reply.status, dict(reply.getheaders()), content

    def __enter__(self) -> Proxy:
        threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


def no_fault(method: str, path: str) -> str:
    return ""


class StoreHost:
    """A host: a working directory, and a cache for its copies."""

    def __init__(self, folder: Path, proxy: Proxy) -> None:
        folder.mkdir()
        self.folder, self.output = folder, ""
        self.options: dict[str, Any] = {
            "cwd": folder,
            "env": one_thread(
                **environment(proxy.address, folder / "cache") | {"LOCKSTEP_STORE_BEAT_S": "1"}
            ),
        }

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        done = run_lockstep(*words, **self.options)
        self.output += done.stdout + done.stderr
        return done

    def start_writer(self, *words: object) -> subprocess.Popen[str]:
        """Start stored_writer.py: a mirror whose training needs no torch."""
        environ = self.options["env"] | {
            "PYTHONPATH": os.pathsep.join([str(SUPPORT.parent), *sys.path])
        }
        command = [sys.executable, "-m", "support.stored_writer", *map(str, words)]
        options = self.options | {
            "env": environ,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        return subprocess.Popen(command, text=True, **options)

    def start(self, *words: object) -> subprocess.Popen[str]:
        return start_lockstep(*words, **self.options)

    def kill(self) -> None:
        """Lose the host: all its processes at once."""
        while pids := processes_in(self.folder):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


def newest_of(proxy: Proxy, run: str) -> Snapshot:
    """Return the newest snapshot of a run, read past the proxy; one without files when there is none."""
    address = parse_address(run)
    assert address
    with mock.patch.dict(os.environ, environment(proxy.server, "unused")):
        return newest(RunBucket(address)) or Snapshot(0, "", 1.0, {})
