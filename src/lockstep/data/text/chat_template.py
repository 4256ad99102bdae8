"""Chat templates, rendered in a process of their own: a template is a program by a stranger, which may loop forever or fill the memory.

One process serves all templates. It reads a request per line and answers with a line, both JSON. In it jinja's sandbox hides Python's
insides; the kernel ends the process when one request takes CPU_S seconds of processor time, and gives it no more than MEMORY_BYTES.
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
TEXT_CHARACTERS = 1 << 24

# A tag of transformers' own around what the model is to learn; here a block like any other, with the same spaces around it.
ANSWER, END_OF_ANSWER = (re.compile(r"(\{%[-+]?\s*)" + word + r"(\s*[-+]?%\})") for word in ("generation", "endgeneration"))


class TemplateError(Exception):
    """Why a template was not rendered."""


class Renderer:
    """The process that renders, started when it is needed first."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # a process that was forked from the owner starts its own

    def render(self, template: str, values: Mapping[str, Any], now: datetime) -> str:
        """The text of a template. TemplateError when it fails or exceeds a limit."""
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            self.start()
        assert self.process and self.process.stdin and self.process.stdout
        request = json.dumps({"template": template, "values": values, "now": now.isoformat()})
        with suppress(BrokenPipeError):
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            slow = code == -signal.SIGPROF
            raise TemplateError(f"it takes more than {CPU_S:g} s" if slow else f"its process ended with exit code {code}")
        answer = json.loads(line)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])

    def start(self) -> None:
        """Start the process, instead of one that has ended."""
        self.close()
        command = [sys.executable, "-P", "-m", "lockstep.data.text.chat_template"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.owner = os.getpid()

    def close(self) -> None:
        """End the process; the next request starts another one."""
        if self.process and self.owner == os.getpid() and self.process.stdin and self.process.stdout:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
        self.process = None


renderer = Renderer()
atexit.register(renderer.close)


# -- in the process that renders --------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer: dict[str, str]
        try:
            answer = {"text": rendered(**json.loads(line))}
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY_BYTES >> 20:,} MiB"}
        except Exception as error:  # whatever a stranger's program raises
            answer = {"error": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def rendered(template: str, values: dict[str, Any], now: str) -> str:
    moment = datetime.fromisoformat(now)
    text = compiled(template).render(values | {"strftime_now": moment.strftime})
    if len(text) > TEXT_CHARACTERS:
        raise jinja2.TemplateError(f"it writes {len(text):,} characters")
    return text


@lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """A chat template, ready to be rendered, in the sandbox."""
    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    room.filters["tojson"] = to_json
    room.globals["raise_exception"] = complain
    return room.from_string(END_OF_ANSWER.sub(r"\1endif\2", ANSWER.sub(r"\1if true\2", template)))


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """As transformers has it: jinja's own escapes HTML, which is no part of a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def complain(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    serve()
