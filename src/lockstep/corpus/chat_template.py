"""Chat templates, rendered in a separate process: untrusted code that could use all time or memory.

The process reads a JSON request per line and writes a JSON response per line. jinja's sandbox hides
Python's internals. The kernel kills the process after CPU_S seconds of CPU time in one request, and
limits its memory to MEMORY_BYTES.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 2.0
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 24

# Tags of transformers around the text to learn; a filter block replaces them and keeps the white
# space.
GENERATION, END_GENERATION = (
    re.compile(r"(\{%[-+]?\s*)" + word + r"(\s*[-+]?%\})")
    for word in ("generation", "endgeneration")
)
# Around the text of a tag, if asked for. No chat contains lone surrogates, and JSON joins no two
# of the second half.
MARKS = "\udc00", "\udfff"


class TemplateError(Exception):
    """A template failed or exceeded a limit."""


class TemplateRenderer:
    """The rendering process, started on first use."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # a forked child starts its own process

    def render(
        self, template: str, values: Mapping[str, Any], now: datetime, *, marked: bool = False
    ) -> str:
        """Return the text; with `marked`, MARKS surround the text to learn. TemplateError."""
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            self.close()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.corpus.chat_template"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.owner = os.getpid()
        assert self.process.stdin and self.process.stdout
        request = json.dumps(
            {"template": template, "values": values, "now": now.isoformat(), "marked": marked}
        )
        with suppress(BrokenPipeError):
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            if code == -signal.SIGPROF:
                raise TemplateError(f"it takes more than {CPU_S:g} s")
            raise TemplateError(f"its process exited with code {code}")
        response = json.loads(line)
        if "error" in response:
            raise TemplateError(response["error"])
        return str(response["text"])

    def close(self) -> None:
        """Stop the process; the next request starts another."""
        process = self.process
        if process and process.stdin and process.stdout and self.owner == os.getpid():
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait()
        self.process = None


renderer = TemplateRenderer()
atexit.register(renderer.close)


def serve() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        response: dict[str, str]
        try:
            response = {"text": render(**json.loads(line))}
        except MemoryError:
            response = {"error": f"it needs more than {MEMORY_BYTES >> 20:,} MiB"}
        except Exception as error:  # anything that untrusted code raises
            response = {"error": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(response).encode() + b"\n")
        sys.stdout.buffer.flush()


def render(template: str, values: dict[str, Any], now: str, marked: bool) -> str:
    current = datetime.fromisoformat(now)
    text = compiled(template, marked).render(values | {"strftime_now": current.strftime})
    if len(text) > MAX_CHARACTERS:
        raise jinja2.TemplateError(f"it writes {len(text):,} characters")
    return text


@lru_cache(maxsize=8)
def compiled(template: str, marked: bool) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json  # the default escapes HTML
    environment.filters["generation"] = (lambda text: text.join(MARKS)) if marked else str
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(
        END_GENERATION.sub(r"\1endfilter\2", GENERATION.sub(r"\1filter generation\2", template))
    )


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    serve()
