"""A headless Chromium that a test drives over its debugging pipe (Chrome DevTools Protocol)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
    or ""
)
PROBLEMS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """One page. problems: what the page wrote to the console, its errors, and refused requests."""

    def __init__(self, profile: Path) -> None:
        theirs, self.to_browser = os.pipe()
        self.from_browser, answers = os.pipe()
        to_browser, from_browser = (
            fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (theirs, answers)
        )
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={profile}",
        ]
        # The debugging pipe has the descriptors 3 and 4.
        command = [
            "bash",
            "-c",
            f'exec "$@" 3<&{to_browser} 4>&{from_browser} 2>/dev/null',
            "bash",
            CHROMIUM,
        ]
        self.process = subprocess.Popen(
            [*command, *options, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_browser, from_browser),
        )
        for descriptor in (theirs, answers, to_browser, from_browser):
            os.close(descriptor)
        self.buffer, self.number, self.session = b"", 0, ""
        self.problems: list[dict[str, Any]] = []
        self.events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self.number:
            pass
        assert "error" not in reply, (method, reply)
        return dict(reply["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            data = os.read(self.from_browser, 1 << 16)
            assert data, "the browser has exited"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = dict(json.loads(line))
        if message.get("method") in PROBLEMS:
            self.problems.append(message["params"])
        self.events.append(message.get("method", ""))
        return message

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._read()

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """kind: mouseMoved, mousePressed or mouseReleased. x, y: in the window."""
        buttons = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **buttons)

    def key(self, key: str, **more: Any) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.to_browser)  # the browser exits at the end of its pipe
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.from_browser)
