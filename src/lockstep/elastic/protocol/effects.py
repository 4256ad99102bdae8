"""Effects: what the protocol asks the membership thread to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.elastic.generation_log import Generation, Member, RunResult


@dataclass(frozen=True)
class Connect:
    """Open a link; `on_link_up` or `on_connect_failed` follows."""

    member: Member


@dataclass(frozen=True)
class Send:
    """Send a message to a linked peer."""

    id: str
    message: dict[str, Any]


@dataclass(frozen=True)
class ReadLog:
    """Read the newest generation above `known`, the waiting room and the liveness files.

    `on_log_read` or `on_disk_error` follows.
    """

    known: int


@dataclass(frozen=True)
class Propose:
    """Propose a generation, with its store filled in; `on_proposed` or `on_disk_error` follows."""

    generation: Generation


@dataclass(frozen=True)
class AbortGroup:
    """The process group is broken: abort every collective that waits in it."""

    why: str


@dataclass(frozen=True)
class FormGroup:
    """This worker is a member of `generation`: its main thread may form the process group."""

    generation: Generation


@dataclass(frozen=True)
class GetReady:
    """The run has started without this worker: build the model, then request to join."""


@dataclass(frozen=True)
class Exit:
    """This worker leaves for good: removed from the run (`fenced`), refused, or the run ended."""

    why: str
    fenced: bool = False
    end: RunResult | None = None


@dataclass(frozen=True)
class LogMessage:
    """A line for the log."""

    text: str


Effect = Connect | Send | ReadLog | Propose | AbortGroup | FormGroup | GetReady | Exit | LogMessage
