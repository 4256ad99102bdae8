"""Effects: requests of the protocol to the membership thread, and the events that follow them."""

from dataclasses import dataclass
from typing import Any

from lockstep.elastic.generation_log import Generation, Member, RunResult


@dataclass(frozen=True)
class Connect:  # open a link; then `on_link_up` or `on_connect_failed`
    member: Member


@dataclass(frozen=True)
class Send:  # send a message to a linked peer
    id: str
    message: dict[str, Any]


@dataclass(frozen=True)
class ReadLog:
    """Read the log above `known`, and the waiting room; then `on_log_read` or `on_disk_error`."""

    known: int


@dataclass(frozen=True)
class Propose:
    """Propose a generation, with its store filled in; then `on_proposed` or `on_disk_error`."""

    generation: Generation


@dataclass(frozen=True)
class AbortGroup:  # abort every collective of the process group
    why: str


@dataclass(frozen=True)
class FormGroup:
    """Let the main thread form the process group of `generation`, which has this worker."""

    generation: Generation


@dataclass(frozen=True)
class GetReady:
    """Build the model, then ask to join: the run has started without this worker."""


@dataclass(frozen=True)
class Exit:  # leave for good: removed from the run (`fenced`), refused, or the run ended
    why: str
    fenced: bool = False
    end: RunResult | None = None


@dataclass(frozen=True)
class LogMessage:
    text: str


Effect = Connect | Send | ReadLog | Propose | AbortGroup | FormGroup | GetReady | Exit | LogMessage
