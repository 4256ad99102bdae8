"""Measure the time from a failure to the next step: Lockstep, torchrun with restarts, torchft.

    python -m bench.failover.run                              ten attempts per kind of fault, about twenty minutes on two cores
    python -m bench.failover.run --only lockstep --tries 20   one of the three systems
    python -m bench.failover.run --torchft PYTHON             an interpreter that has torchft; without it torchft is skipped
    python -m bench.failover.run --keep NAME                  add to bench/failover/DATE-NAME/

Each attempt is a separate training: three processes of one thread, and a model so small that steps are short. The fault happens at a
random moment after step 20. Seconds count from just before it to the first step committed without the affected workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from support.hosts import why_no_hosts

from bench.failover.subjects import AFTER, Lockstep, Subject, Torchft, Torchrun, tiny
from bench.results import HOW, command_line, machine, result_folder
from lockstep.corpus.encoded_pairs import prepare

POLL_S = 0.002
READY_S = 120.0
PATIENCE_S = 60.0  # without a step: it hangs
SYSTEMS = ("lockstep", "torchrun", "torchft")

Try = dict[str, object]


@dataclass(frozen=True)
class Kind:
    """A fault and the system that it affects.

    begin   starts one in a folder, over a prepared corpus
    goal_s  what the median shall not exceed, with `steps` more steps; 0: nothing was promised
    """

    system: str
    fault: str
    begin: Callable[[Path, Path], Subject]
    goal_s: float = 0.0
    steps: int = 0


def kinds(torchft: str) -> list[Kind]:
    """All of them; those of torchft when there is an interpreter that has it."""
    found = [
        Kind(
            "lockstep",
            "SIGKILL: a worker that does not lead",
            partial(Lockstep, fault="worker", hosts=1),
            0.3,
            1,
        ),
        Kind(
            "lockstep",
            "SIGKILL: the leader and its agent",
            partial(Lockstep, fault="leader", hosts=1),
            0.3,
            1,
        ),
        Kind("lockstep", "SIGSTOP: a worker", partial(Lockstep, fault="stop", hosts=1)),
        Kind(
            "lockstep",
            "SIGKILL: all of one of three hosts",
            partial(Lockstep, fault="host", hosts=3),
        ),
        Kind(
            "lockstep",
            "one of three hosts falls silent",
            partial(Lockstep, fault="silence", hosts=3),
            3.5,
        ),
        Kind("torchrun", "SIGKILL: a worker; default settings", partial(Torchrun, environ={})),
        Kind(
            "torchrun",
            "SIGKILL: a worker; store not shared",
            partial(Torchrun, environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        ),
    ]
    usual = {"join_timeout_ms": 10_000, "quorum_tick_ms": 100}
    short = {"join_timeout_ms": 1_000, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 1_000}
    if torchft:
        ddp, manager = (
            partial(Torchft, python=torchft, reduce=reduce) for reduce in ("ddp", "manager")
        )
        found.append(
            Kind(
                "torchft",
                "SIGKILL: a replica; its DDP, usual time-outs",
                partial(ddp, limits=usual),
            )
        )
        found.append(
            Kind(
                "torchft",
                "SIGKILL: a replica; by hand, short time-outs",
                partial(manager, limits=short),
            )
        )
    return found


def main() -> int:
    """Run each kind of fault in turn; return 0 for any result."""
    args = arguments()
    asked = [kind for kind in kinds(args.torchft) if args.only in (None, kind.system)]
    if why_not := why_no_hosts():
        print(f"skipped the faults that need three hosts: {why_not}")
        asked = [kind for kind in asked if "hosts" not in kind.fault]
    load_before, raw = os.getloadavg(), list[Try]()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-failover-"))
    prepare(tiny().run.data, tiny().run.tokenizer, folder / "data")
    for number in range(args.tries):
        for place, kind in enumerate(asked):
            home = folder / f"{kind.system}-{place}-{number}"
            home.mkdir()
            raw.append(attempt(kind, number, home, folder / "data"))
            print(json.dumps(raw[-1]), flush=True)
            if raw[-1]["outcome"] == "continued":
                shutil.rmtree(home)
    print("", *table(raw), "", f"failed attempts are in {folder}", sep="\n")
    if args.keep:
        print(f"kept in {keep(result_folder(args.keep), raw, machine('fp32', load_before))}")
    return 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SYSTEMS)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument(
        "--torchft", metavar="PYTHON", default="", help="an interpreter that has torchft"
    )
    parser.add_argument("--keep", metavar="NAME", help="add the numbers to bench/DATE-NAME")
    args = parser.parse_args()
    if args.only == "torchft" and not args.torchft:
        parser.error("--only torchft needs --torchft PYTHON")
    return args


def attempt(kind: Kind, number: int, folder: Path, data: Path) -> Try:
    """Run one attempt.

    outcome  continued, hung (no step within 60 s), exited, or did not heal (no three workers within 60 s)
    seconds  from just before the fault to the first step without the affected workers
    whole_s  the same, until three train again
    """
    chance = random.Random(f"{kind.fault} {number}")
    result: Try = {
        "system": kind.system,
        "fault": kind.fault,
        "try": number,
        "outcome": "continued",
    }
    subject = kind.begin(folder, data)
    try:
        if not wait(subject.ready, subject.over, READY_S):
            return result | {"outcome": f"never came to step {AFTER}"}
        time.sleep(chance.uniform(0.0, 0.5))
        began_s = time.monotonic()
        result |= subject.strike(chance, even=number % 2 == 0)
        result["step_s"] = round(subject.step_s, 4)
        if not wait(subject.back, subject.over, PATIENCE_S):
            return result | {"outcome": "exited" if subject.over() else "hung"}
        result["seconds"] = round(time.monotonic() - began_s, 4)
        if kind.system != "torchft":
            subject.restore()
            if not wait(subject.whole, subject.over, PATIENCE_S):
                return result | {"outcome": "did not heal"}
            result["whole_s"] = round(time.monotonic() - began_s, 4)
        return result
    finally:
        subject.close()


def wait(done: Callable[[], bool], over: Callable[[], bool], limit_s: float) -> bool:
    """Whether it is done within `limit_s` seconds and before all is over."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        last_look = over()
        if done():
            return True
        if last_look:
            return False
        time.sleep(POLL_S)
    return False


def table(raw: Sequence[Try]) -> Iterator[str]:
    """As Markdown that is also readable on a terminal. `times`: the median over that of a worker's kill under Lockstep."""
    yield row(
        "whose",
        "what happens",
        "tries",
        "median",
        "worst",
        "not",
        "whole",
        "step",
        "times",
        "goal",
        "met",
    )
    yield row("---", "---", "---:", "---:", "---:", "---:", "---:", "---:", "---:", "---", "---")
    ours: float | None = None
    for kind in kinds("any"):
        tries = [one for one in raw if (one["system"], one["fault"]) == (kind.system, kind.fault)]
        seconds, whole, step = (numbers(tries, name) for name in ("seconds", "whole_s", "step_s"))
        failed = sum(one["outcome"] != "continued" for one in tries)
        if not seconds:
            if tries:
                yield row(
                    kind.system,
                    kind.fault,
                    str(len(tries)),
                    "",
                    "",
                    str(failed),
                    "",
                    "",
                    "",
                    "",
                    "",
                )
            continue
        step_s, middle = median(step), median(seconds)
        ours = middle if ours is None and kind.system == "lockstep" else ours
        goal_s = kind.goal_s + kind.steps * step_s
        cells = [
            f"{middle:.3f} s",
            f"{max(seconds):.3f} s",
            str(failed),
            f"{median(whole):.1f} s" if whole else "",
            f"{step_s:.3f} s",
        ]
        promised = (
            [f"<= {goal_s:.2f} s", "yes" if middle <= goal_s and not failed else "no"]
            if kind.goal_s
            else ["", ""]
        )
        yield row(
            kind.system,
            kind.fault,
            str(len(tries)),
            *cells,
            f"{middle / ours:.1f}" if ours else "",
            *promised,
        )


def row(*cells: str) -> str:
    widths = (8, 44, 5, 9, 9, 4, 7, 7, 6, 9, 4)
    left = {0, 1, 9, 10}
    texts = [
        f"{cell:{'<' if place in left else '>'}{width}}"
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(texts)} |"


def numbers(tries: Sequence[Try], name: str) -> list[float]:
    """Those of the tries that have one."""
    return [value for one in tries if isinstance(value := one.get(name), float)]


def keep(folder: Path, raw: Sequence[Try], about: str) -> Path:
    """Add to the folder of a measurement."""
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in raw)
    for name, text in (("command", command_line()), ("machine", about), ("raw.jsonl", lines)):
        with open(folder / name, "a") as file:
            file.write(text)
    shown = "\n".join(
        table([json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines()])
    )
    (folder / "README.md").write_text(
        f"# {folder.name}\n\n```\n{(folder / 'machine').read_text()}```\n\n{shown}\n\n{HOW}\n"
    )
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
