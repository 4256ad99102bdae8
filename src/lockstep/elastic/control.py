"""What a person asks of a running run, from any host that sees its folder: who is in it, and that it stops.

The newest generation says where its members listen, the waiting room where those do who wait or stand by; the run's token, in the run
folder for its owner alone, lets one ask.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.elastic import waiting_room as waiting
from lockstep.elastic.generation_log import Arbiter, Member, Record
from lockstep.elastic.link import Stranger, ask, read_token
from lockstep.elastic.protocol import names
from lockstep.errors import DamagedFileError, PeersLostError, UsageError
from lockstep.files import read_json
from lockstep.runtime.worker_env import Sitter

ASK_S = 3.0


def newest(run: Path) -> tuple[Record | None, list[Member]]:
    """The newest generation of `run`, and who waits in its folder. UsageError when it has neither."""
    try:
        record, room = Arbiter(run / "generations").newest(), list(waiting.members(run))
    except FileNotFoundError:
        record, room = None, []
    except DamagedFileError:
        raise
    except OSError as error:
        raise UsageError(f"the generations of {run} cannot be read: {error}", str(run / "generations"), "is the disk there?") from None
    if record is None and not room:
        there = "there is no such folder" if not run.is_dir() else "it has no generations, and no worker waits to begin"
        raise UsageError(f"{run} is no run: {there}", "command line", "give the folder that --out named; workers that start take a moment")
    return record, room


def listeners(record: Record | None, room: Sequence[Member]) -> list[Member]:
    """Who can be told that the run is to stop: members first, then those who wait."""
    members = record.members if record and not record.end else ()
    return [*members, *(one for one in room if one not in members)]


def tell_to_stop(run: Path, some: Sequence[Member], name: str, *, within_s: float, each_s: float = ASK_S) -> Member | None:
    """The first of them that has heard that the run is to stop as on the signal `name`; nobody new is asked after `within_s`."""
    until_s = time.monotonic() + within_s
    for one in some:
        if time.monotonic() > until_s:
            break
        if ask_member(run, one, {"kind": "stop", "signal": name}, each_s).get("kind") == "stopping":
            return one
    return None


def ask_member(run: Path, member: Member, message: dict[str, Any], timeout_s: float = ASK_S) -> dict[str, Any]:
    """A member's answer; {"unreachable": WHY} when there is none."""
    try:
        return ask(member.address, read_token(run), message, timeout_s)
    except (OSError, EOFError, ValueError, Stranger) as error:
        return {"unreachable": str(error) or type(error).__name__}


def stop(run: Path) -> str:
    """Ask the run to save and stop; a sentence on who heard it. Its command ends with exit code 75."""
    record, room = newest(run)
    some = listeners(record, room)
    heard = tell_to_stop(run, some, "SIGTERM", within_s=math.inf)
    if heard and record and heard in record.members:
        return f"{names([heard])} passes it on: all save and stop after this step"
    if heard and record and not record.end:
        return f"{names([heard])}, which stands by, passes it on: no member of generation {record.number} answers here"
    if heard:
        return f"{names([heard])} passes it on: nobody trains, so all who wait end"
    if record and record.end:
        return f"{run} has ended already, with exit code {record.end.code}"
    raise PeersLostError(
        f"none of the {len(some)} workers of {f'generation {record.number}' if record else 'a run that has not begun'} answers",
        ", ".join(member.address for member in some),
        "they may have ended (lockstep status), or a firewall stands between; SIGTERM to an agent does the same",
    )


def status(run: Path) -> dict[str, Any]:
    """The newest generation, what each of its members says, and who waits or stands by."""
    record, room = newest(run)
    members = list(record.members) if record else []
    room = [one for one in room if one not in members]
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(members) + len(room)))) as asking:
        answers = list(asking.map(lambda member: ask_member(run, member, {"kind": "status"}), [*members, *room]))
    told = [row(rank, member, answer) for rank, (member, answer) in enumerate(zip(members, answers, strict=False))]
    waits = [row(None, one, answer) for one, answer in zip(room, answers[len(members) :], strict=True) if "unreachable" not in answer]
    ended = {"code": record.end.code, "text": record.end.text} if record and record.end and not waits else None
    if record and (not record.end or ended):
        facts = {"generation": record.number, "began_at_step": record.step, "reason": record.reason}
    else:
        facts = {"generation": 0, "began_at_step": 0, "reason": "its workers wait to begin"}
    return {"run": str(run), **facts, "members": told, "waiting": waits, "evaluators": evaluators(run), "ended": ended}


def row(rank: int | None, member: Member, answer: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to say of a worker; one without a rank waits."""
    doing = answer.get("doing") or {}
    one: dict[str, Any] = {"rank": rank, "host": member.host, "slot": member.slot, "pid": member.pid, "address": member.address}
    role = "waiting" if rank is None else "leader" if rank == 0 else "worker"
    one |= {"role": role, "step": doing.get("step"), "phase": doing.get("phase")}
    return one | ({"unreachable": answer["unreachable"]} if "unreachable" in answer else {})


def evaluators(run: Path) -> list[dict[str, Any]]:
    """The evaluating processes that an agent has noted in the run folder, less those of this machine that have ended since."""
    found = []
    for path in sorted((run / "evaluators").glob("[!.]*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):  # gone meanwhile, or damaged
            one = read_json(path)
            if one["machine"] != socket.gethostname() or Sitter(one["pid"], one["started"]).alive:
                found.append(one)
    return found


def show(found: dict[str, Any]) -> str:
    """The status as a table."""
    if found["ended"]:
        return f"{found['run']} has ended with exit code {found['ended']['code']}\n{found['ended']['text']}".rstrip()
    at_work = f"generation {found['generation']}, from step {found['began_at_step']} on" if found["generation"] else found["run"]
    lines = [f"{at_work}: {found['reason']}"]
    rows: list[tuple[str, ...]] = [("rank", "host", "slot", "pid", "role", "step", "phase")]
    for one in [*found["members"], *found["waiting"], *found["evaluators"]]:
        says = one.get("phase") or one.get("unreachable") or ""
        rows.append((*(str(one.get(key) if one.get(key) is not None else "") for key in rows[0][:-1]), says))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join([*lines, *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)])
