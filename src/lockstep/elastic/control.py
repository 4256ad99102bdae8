"""Show the workers of a run and stop it, from any host that sees its folder.

The newest generation and the waiting room contain the addresses of the workers. The run's token,
which only the owner of the run folder can read, authenticates requests.
"""

import math
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.elastic.generation_log import NO_GENERATION, Generation, GenerationLog, Member
from lockstep.elastic.link import AuthenticationError, send_control_message
from lockstep.elastic.protocol.decisions import member_names
from lockstep.elastic.run_folder import open_waiting_room, read_token
from lockstep.errors import DamagedFileError, PeersLostError, UsageError
from lockstep.files import read_json
from lockstep.network.shares import format_shares
from lockstep.record.events import iter_events
from lockstep.runtime.worker_env import ProcessIdentity

REPLY_TIMEOUT_S = 3.0


def read_newest(run: Path) -> tuple[Generation, list[Member]]:
    """Return the newest generation and the waiting workers. UsageError if there is neither."""
    try:
        record = GenerationLog(run / "generations").newest()
        waiting_members = open_waiting_room(run).members()
    except FileNotFoundError:
        record, waiting_members = NO_GENERATION, []
    except DamagedFileError:
        raise
    except OSError as error:
        raise UsageError(
            f"cannot read the generations of {run}: {error}",
            str(run / "generations"),
            "is the disk mounted?",
        ) from None
    if not record.number and not waiting_members:
        reason = (
            "there is no such folder"
            if not run.is_dir()
            else "it has no generations, and no worker waits to start"
        )
        raise UsageError(
            f"{run} is not a run: {reason}",
            "command line",
            "give the folder set with --out; workers need a moment to start",
        )
    return record, waiting_members


def stop_recipients(record: Generation, waiting_members: Sequence[Member]) -> list[Member]:
    """Return the workers that can be asked to stop the run: members first, then waiting ones."""
    members = () if record.end else record.members
    return [*members, *(member for member in waiting_members if member not in members)]


def request_stop(
    run: Path,
    recipients: Sequence[Member],
    signal_name: str,
    *,
    within_s: float,
    each_s: float = REPLY_TIMEOUT_S,
) -> Member | None:
    """Ask workers in turn, for `within_s`, to stop the run; return the first one that accepts."""
    until_s, message = time.monotonic() + within_s, {"kind": "stop", "signal": signal_name}
    in_time = (member for member in recipients if time.monotonic() <= until_s)
    return next(
        (
            member
            for member in in_time
            if query_member(run, member, message, each_s).get("kind") == "stopping"
        ),
        None,
    )


def query_member(
    run: Path, member: Member, message: dict[str, Any], timeout_s: float = REPLY_TIMEOUT_S
) -> dict[str, Any]:
    """Send a message to a worker and return its reply; {"unreachable": REASON} if there is none."""
    try:
        return send_control_message(member.address, read_token(run), message, timeout_s)
    except (OSError, EOFError, ValueError, AuthenticationError) as error:
        reason = getattr(error, "strerror", "") or str(error) or type(error).__name__
        return {"unreachable": reason}


def stop_run(run: Path) -> str:
    """Ask the run to save and stop (exit code 75); describe the worker that accepted."""
    record, waiting_members = read_newest(run)
    recipients = stop_recipients(record, waiting_members)
    accepted = request_stop(run, recipients, "SIGTERM", within_s=math.inf)
    if accepted:
        prefix = f"{member_names([accepted])} accepted the stop request"
        if accepted in record.members:
            return f"{prefix}: all workers save and stop after this step"
        if record.number and not record.end:
            return (
                f"{prefix}: it waits to join and passes it on; "
                f"no member of generation {record.number} answers here"
            )
        return f"{prefix}: no worker is training, all waiting workers exit"
    if record.end:
        return f"{run} has already ended, with exit code {record.end.code}"
    where = f"generation {record.number}" if record.number else "a run that has not started"
    raise PeersLostError(
        f"none of the {len(recipients)} workers of {where} answers",
        ", ".join(member.address for member in recipients),
        "they may have exited (lockstep status), or a firewall blocks the port; "
        "SIGTERM to an agent does the same",
    )


def run_status(run: Path, shares: Mapping[int, list[int]] | None = None) -> dict[str, Any]:
    """Return the newest generation, the status of each member, and the waiting workers, as JSON.
    shares: the newest ones by generation; None: read them from the events."""
    record, waiting_members = read_newest(run)
    asked: list[tuple[int | None, Member]] = [*enumerate(record.members)]
    asked += [(None, member) for member in waiting_members if member not in record.members]
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(asked)))) as executor:
        replies = executor.map(lambda one: query_member(run, one[1], {"kind": "status"}), asked)
        rows = [
            (reply, status_row(rank, member, reply))
            for (rank, member), reply in zip(asked, replies, strict=True)
        ]
    members = [row for _, row in rows if row["rank"] is not None]
    waiting = [row for reply, row in rows if row["rank"] is None and "unreachable" not in reply]
    ended = vars(record.end) if record.end and not waiting else None
    is_start = not record.number or bool(record.end and waiting)
    return {
        "run": str(run),
        "generation": 0 if is_start else record.number,
        "began_at_step": 0 if is_start else record.step,
        "reason": "its workers wait to start" if is_start else record.reason,
        "shares": newest_shares(run, record.number)
        if shares is None
        else shares.get(record.number, []),
        "members": members,
        "waiting": waiting,
        "evaluators": running_evaluators(run),
        "ended": ended,
    }


def newest_shares(run: Path, generation: int) -> list[int]:
    """Return the numbers of micro-batches of a step, by replica; [] if they have not been
    changed."""
    events = [
        event
        for event in iter_events(run)
        if event["event"] == "shares" and event.get("generation") == generation
    ]
    return list(events[-1].get("shares", [])) if events else []


def status_row(rank: int | None, member: Member, reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a worker; rank None: it waits to join."""
    doing = reply.get("doing") or {}
    role = "waiting"
    if rank is not None:
        role = "worker" if rank else "leader"
    row = {
        "rank": rank,
        "host": member.host,
        "slot": member.slot,
        "pid": member.pid,
        "address": member.address,
        "role": role,
        "step": doing.get("step"),
        "phase": doing.get("phase"),
    }
    return row | ({"unreachable": reply["unreachable"]} if "unreachable" in reply else {})


def running_evaluators(run: Path) -> list[dict[str, Any]]:
    """Return the evaluators in the run folder that may be running."""
    evaluators = []
    for path in sorted((run / "evaluators").glob("[!.]*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):  # deleted meanwhile, or damaged
            evaluator = read_json(path)
            if (
                evaluator["machine"] != socket.gethostname()
                or ProcessIdentity(evaluator["pid"], evaluator["started"]).alive
            ):
                evaluators.append(evaluator)
    return evaluators


def format_status(status: dict[str, Any]) -> str:
    if ended := status["ended"]:
        return f"{status['run']} ended with exit code {ended['code']}\n{ended['text']}".rstrip()
    rows = worker_rows(status)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([generation_line(status), *lines])


def generation_line(status: dict[str, Any]) -> str:
    title = (
        f"generation {status['generation']}, after step {status['began_at_step']}"
        if status["generation"]
        else status["run"]
    )
    shares = f"; shares {format_shares(status['shares'])}" if len(set(status["shares"])) > 1 else ""
    return f"{title}: {status['reason']}{shares}"


def worker_rows(status: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of a table of all workers, the head first."""
    head = ("rank", "host", "slot", "pid", "role", "step", "phase")
    rows: list[tuple[str, ...]] = [head]
    for worker in [*status["members"], *status["waiting"], *status["evaluators"]]:
        phase = worker.get("phase") or worker.get("unreachable")
        cells = [worker.get(key) for key in head[:-1]]
        rows.append(tuple("" if cell is None else str(cell) for cell in [*cells, phase]))
    return rows
