"""Who failed first: what each worker says of its own end, and the one verdict over all the ends.

One worker's failure makes all the others fail, often earlier on the screen than its own. So each worker says in one line of JSON how it
ended and when, by CLOCK_MONOTONIC, one clock for all processes of a machine; those that only lost a peer say that too. The verdict
is the earliest end that is no consequence.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.errors import LockstepError

AGREED = (0, 75, 130)  # codes of a worker that was not disturbed: done, saved and to be started again, saved on SIGINT

# What torch 2.13 says when a peer is gone or silent: gloo's pairs and buffers, the TCPStore, NCCL. Each seen, but for NCCL's.
GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Read error|Write error|Read timeout"
    r"|Timed out waiting \d+ms for (send|recv)|Application timeout caused pair closure|Socket closed|Failed to recv, got 0 bytes"
    r"|wait timeout after \d+ms|client socket has timed out|timed out connecting"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|Watchdog caught collective operation timeout"
)


# What torch, oneDNN and Python say when there is no memory. A thread needs addresses for its stack.
NO_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "could not create a primitive", "can't start new thread")


@dataclass(frozen=True)
class Account:
    """What a worker says of its own end, at CLOCK_MONOTONIC's `at_s`.

    text        what a person should read first: an error's three parts, or a traceback
    trace       the whole traceback, for the log
    finished    its function returned; a process that ends with code 0 and did not say so broke off
    lost_peers  the end is the consequence of another's
    step        steps that it had committed; -1: it does not know
    drained     it left between two steps because its host is taken away, and the others go on
    """

    code: int
    at_s: float
    text: str = ""
    trace: str = ""
    finished: bool = False
    lost_peers: bool = False
    step: int = -1
    drained: bool = False

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Account:
        """The account in a line of JSON."""
        return Account(**json.loads(line))


@dataclass(frozen=True)
class End:
    """One worker's end, as its parent saw it.

    code   as subprocess has it: -n when signal n ended it; None: it was nobody's child here, so nobody can know
    sent   signals that the parent sent to end it
    log    where its output is, "" when nowhere
    tail   the last lines of that output
    title  what `rank` counts: ranks, or the slots of a host
    """

    rank: int
    pid: int
    code: int | None
    at_s: float
    sent: tuple[int, ...] = ()
    account: Account | None = None
    log: str = ""
    tail: str = ""
    title: str = "rank"

    @property
    def signal(self) -> int:
        """The signal that ended it; 0: none did, or nobody knows."""
        return -self.code if self.code is not None and self.code < 0 else 0

    def __str__(self) -> str:
        return f"{self.title} {self.rank} (pid {self.pid})"


def peers_lost(error: BaseException | None) -> bool:
    """Whether an error of torch.distributed (or its cause) says that a peer is gone or silent."""
    while error is not None:
        if isinstance(error, RuntimeError) and GONE.search(str(error)):
            return True
        error = error.__cause__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory: Python's, torch's on a GPU, or its allocator's on a CPU."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def plainly(error: BaseException) -> str:
    """What happened; of a torch error its first line, without its source file, its stack and its advice."""
    if isinstance(error, LockstepError):
        return error.what
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\.cc:\d+\] |\. This is typically caused by.*$", "", line)


def kind(end: End) -> str:
    """What an end is: "failed", "lost" (its peers), "broke off" (code 0 in the middle), "ended" (by the parent), "left"."""
    account = end.account
    if account and not account.finished:
        if account.lost_peers:
            return "lost"
        return "failed" if account.code else "broke off"
    if end.signal in end.sent and not account:
        return "ended"
    code = code_of(end)
    if code not in AGREED or (end.signal and end.signal not in end.sent):
        return "failed"
    return "left" if account or code else "broke off"


def code_of(end: End) -> int:
    """The exit code that a worker wanted: what it said counts when it failed, and when the parent ended it on its way out."""
    if end.account and (end.code is None or not end.account.finished or end.signal in end.sent):
        return end.account.code
    if end.code is None:
        return 1
    return 128 + end.signal if end.signal else end.code


def verdict(ends: Sequence[End], *, asked: Sequence[int] = (), grace_s: float = 0.0) -> tuple[int, str]:
    """(exit code of the whole command, what to print, "" for nothing).

    asked    signals that the parent was sent and passed on
    grace_s  how long it then waited before it ended those that had not stopped
    """
    ends = sorted(ends, key=lambda end: end.account.at_s if end.account else end.at_s)
    of_kind = {name: [end for end in ends if kind(end) == name] for name in ("failed", "broke off", "lost", "ended", "left")}
    codes = {code_of(end) for end in ends}
    if len(codes) == 1 and not of_kind["failed"] and not of_kind["lost"] and not of_kind["ended"]:
        return codes.pop(), ""
    if of_kind["failed"]:
        first = of_kind["failed"][0]
        return code_of(first), "\n".join([tell(first, ends, asked), *others(first, ends)])
    early = of_kind["broke off"] or [end for end in of_kind["left"] if of_kind["lost"] and code_of(end) == 0]
    if early:
        return 1, "\n".join([tell_early(early[0]), *others(early[0], ends)])
    if of_kind["lost"]:
        first = of_kind["lost"][0]
        return code_of(first), "\n".join([tell(first, ends, asked), *others(first, ends)])
    if of_kind["ended"] and asked:
        name = signal.Signals(asked[0]).name
        error = LockstepError(
            f"{ranks(of_kind['ended'])} did not stop within {grace_s:g} s of {name}",
            places(of_kind["ended"]),
            "they were ended; start the same command again to go on from the newest checkpoint",
        )
        return 128 + asked[0], str(error)
    listed = ", ".join(f"{end.title} {end.rank} with {code_of(end)}" for end in ends)
    return 1, str(LockstepError(f"the workers do not agree how it ended: {listed}", places(ends)))


def tell(first: End, ends: Sequence[End], asked: Sequence[int]) -> str:
    """The first failure in its own words."""
    if first.account and first.account.text:
        alike = [end for end in ends if end.account and end.account.text == first.account.text]
        text = first.account.text.rstrip()
        if len(alike) == len(ends):
            return text
        where = f"\n  log: {first.log}" if first.log else ""
        return f"{ranks(alike)} (pid {first.pid}) failed first:\n{text}{where}"
    log = f"log: {first.log}" if first.log else ""
    if not first.signal:
        code = "an exit code that nobody could see" if first.code is None else f"exit code {first.code}"
        return with_tail(first, LockstepError(f"{first} ended with {code}, without a word", log))
    number = first.signal
    if number in asked:
        return str(LockstepError(f"{first} was ended by {signal.Signals(number).name} before it could save and stop", log))
    hints: dict[int, str] = {
        signal.SIGKILL: "nobody of ours sent it: the kernel does when memory runs out (journalctl -k, or dmesg), or somebody did",
        signal.SIGBUS: "the kernel sends it when /dev/shm or the disk under a mapped file is full (df)",
        signal.SIGSEGV: "a fault in compiled code; PYTHONFAULTHANDLER=1 shows where",
    }
    return with_tail(first, LockstepError(f"{first} was ended by {signal_name(number)}", log, hints.get(number, "")))


def signal_name(number: int) -> str:
    """ "SIGKILL", or "signal 70" for one without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def tell_early(first: End) -> str:
    """The words for a worker that was gone while the others still needed it."""
    what = "broke off with exit code 0" if kind(first) == "broke off" else "was done and left"
    hint = "all workers must take the same number of steps; a worker leaves by returning from its function, not by sys.exit"
    log = f"log: {first.log}" if first.log else ""
    return with_tail(first, LockstepError(f"{first} {what} while the others were at work", log, hint))


def with_tail(end: End, error: LockstepError) -> str:
    """The error, and the last lines of the worker's output under it."""
    return "\n".join([str(error), *[f"  | {line}" for line in end.tail.splitlines()]])


def others(first: End, ends: Sequence[End]) -> list[str]:
    """A line for what the others did, group by group."""
    text = first.account.text if first.account else ""
    rest = [end for end in ends if end is not first and not (text and end.account and end.account.text == text)]
    lost = [end for end in rest if kind(end) == "lost"]
    failed = [end for end in rest if kind(end) == "failed"]
    lines = [f"{ranks(lost)} lost {'their' if len(lost) > 1 else 'its'} peers"] if lost else []
    for end in failed:
        said = end.account.text.strip().splitlines() if end.account and end.account.text else [f"exit code {end.code}"]
        words = said[-1] if said[0].startswith("Traceback") else said[0]
        lines.append(f"{end.title} {end.rank} failed too: {words}" + (f" (log: {end.log})" if end.log else ""))
    return lines


def ranks(ends: Sequence[End]) -> str:
    """ "rank 1", "ranks 0, 2 and 3"."""
    numbers = [str(end.rank) for end in sorted(ends, key=lambda end: end.rank)]
    if len(numbers) == 1:
        return f"{ends[0].title} {numbers[0]}"
    return f"{ends[0].title}s {', '.join(numbers[:-1])} and {numbers[-1]}"


def places(ends: Sequence[End]) -> str:
    """The logs of these workers, one a line."""
    return "\n".join(f"log: {end.log}" for end in ends if end.log)
