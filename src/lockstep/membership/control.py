"""What a person asks of a running run, from any host that sees its folder: who is in it, and that it stops.

The newest generation says where its members listen; the run's token, in the run folder for its owner alone, lets one ask.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.errors import PeersLostError, UsageError
from lockstep.files import read_json
from lockstep.membership.arbiter import Arbiter, Member, Record
from lockstep.membership.wire import Stranger, ask, read_token

ASK_S = 3.0


def newest(run: Path) -> Record:
    """The newest generation of `run`. UsageError when the folder has none."""
    try:
        record = Arbiter(run / "generations").newest()
    except FileNotFoundError:
        record = None
    except OSError as error:
        raise UsageError(f"the generations of {run} cannot be read: {error}", str(run / "generations"), "is the disk there?") from None
    if record is None:
        there = "there is no such folder" if not run.is_dir() else "it has no generations: nothing was started there"
        raise UsageError(f"{run} is no run: {there}", "command line", "give the folder that --out named")
    return record


def ask_member(run: Path, member: Member, message: dict[str, Any]) -> dict[str, Any]:
    """A member's answer; {"unreachable": WHY} when there is none."""
    try:
        return ask(member.address, read_token(run), message, ASK_S)
    except (OSError, EOFError, Stranger) as error:
        return {"unreachable": str(error) or type(error).__name__}


def stop(run: Path) -> str:
    """Ask the run to save and stop; a sentence on who heard it. Its command ends with exit code 75."""
    record = newest(run)
    if record.end:
        return f"{run} has ended already, with exit code {record.end.code}"
    for member in record.members:
        answer = ask_member(run, member, {"kind": "stop"})
        if answer.get("kind") == "stopping":
            return f"{member.id.rpartition('/')[0]} passes it on: all save and stop after this step"
    raise PeersLostError(
        f"none of the {len(record.members)} members of generation {record.number} answers",
        ", ".join(member.address for member in record.members),
        "they may have ended (lockstep status), or a firewall stands between; SIGTERM to an agent does the same",
    )


def status(run: Path) -> dict[str, Any]:
    """The newest generation and what each of its members says."""
    record = newest(run)
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(record.members)))) as asking:
        answers = list(asking.map(lambda member: ask_member(run, member, {"kind": "status"}), record.members))
    members = []
    for rank, (member, answer) in enumerate(zip(record.members, answers, strict=True)):
        one: dict[str, Any] = {"rank": rank, "host": member.host, "slot": member.slot, "pid": member.pid, "address": member.address}
        doing = answer.get("doing") or {}
        one |= {"role": "leader" if rank == 0 else "worker", "step": doing.get("step"), "phase": doing.get("phase")}
        members.append(one | ({"unreachable": answer["unreachable"]} if "unreachable" in answer else {}))
    facts = {"generation": record.number, "began_at_step": record.step, "reason": record.reason}
    ended = {"code": record.end.code, "text": record.end.text} if record.end else None
    return {"run": str(run), **facts, "members": members, "evaluators": evaluators(run), "ended": ended}


def evaluators(run: Path) -> list[dict[str, Any]]:
    """The evaluating processes that an agent has noted in the run folder."""
    return [read_json(path) for path in sorted((run / "evaluators").glob("[!.]*.json"))]


def show(found: dict[str, Any]) -> str:
    """The status as a table."""
    if found["ended"]:
        return f"{found['run']} has ended with exit code {found['ended']['code']}\n{found['ended']['text']}".rstrip()
    lines = [f"generation {found['generation']}, from step {found['began_at_step']} on: {found['reason']}"]
    rows: list[tuple[str, ...]] = [("rank", "host", "slot", "pid", "role", "step", "phase")]
    for one in [*found["members"], *found["evaluators"]]:
        says = one.get("phase") or one.get("unreachable") or ""
        rows.append((*(str(one.get(key) if one.get(key) is not None else "") for key in rows[0][:-1]), says))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join([*lines, *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)])
