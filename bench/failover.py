"""How long a training stands still when something dies: Lockstep, torchrun with restarts, torchft.

python bench/failover.py                              ten tries of each kind of fault, about twenty minutes on two cores
python bench/failover.py --only lockstep --tries 20   one of the three
python bench/failover.py --torchft PYTHON             an interpreter that has torchft; without it torchft is left out
python bench/failover.py --keep failover              add to bench/DATE-failover/{command,machine,raw.jsonl}; README.md tells all of it

Each try is a training of its own: three processes of one thread, a model so small that its steps are short. The fault comes at a
random moment after step 20. Seconds count from just before it to the first step that is committed without those it met.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from failover_subjects import AFTER, Lockstep, Subject, Torchft, Torchrun, tiny
from run import kept_folder, machine
from support.hosts import why_no_hosts

from lockstep.data.pairs.prepare import prepare

POLL_S = 0.002
READY_S = 120.0
PATIENCE_S = 60.0  # without a step: it hangs
SYSTEMS = ("lockstep", "torchrun", "torchft")

Try = dict[str, object]


@dataclass(frozen=True)
class Kind:
    """What happens to whose training.

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
        Kind("lockstep", "SIGKILL: a worker that does not lead", partial(Lockstep, fault="worker", hosts=1), 0.3, 1),
        Kind("lockstep", "SIGKILL: the leader and its agent", partial(Lockstep, fault="leader", hosts=1), 0.3, 1),
        Kind("lockstep", "SIGSTOP: a worker", partial(Lockstep, fault="stop", hosts=1)),
        Kind("lockstep", "SIGKILL: all of one of three hosts", partial(Lockstep, fault="host", hosts=3)),
        Kind("lockstep", "one of three hosts falls silent", partial(Lockstep, fault="silence", hosts=3), 3.5),
        Kind("torchrun", "SIGKILL: a worker; default settings", partial(Torchrun, environ={})),
        Kind("torchrun", "SIGKILL: a worker; store not shared", partial(Torchrun, environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})),
    ]
    usual = {"join_timeout_ms": 10_000, "quorum_tick_ms": 100}
    short = {"join_timeout_ms": 1_000, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 1_000}
    if torchft:
        ddp, manager = (partial(Torchft, python=torchft, reduce=reduce) for reduce in ("ddp", "manager"))
        found.append(Kind("torchft", "SIGKILL: a replica; its DDP, usual time-outs", partial(ddp, limits=usual)))
        found.append(Kind("torchft", "SIGKILL: a replica; by hand, short time-outs", partial(manager, limits=short)))
    return found


def main() -> int:
    """Try each kind in turn, as often as asked; 0 whatever came out."""
    args = arguments()
    asked = [kind for kind in kinds(args.torchft) if args.only in (None, kind.system)]
    if why_not := why_no_hosts():
        print(f"what needs three hosts is left out: {why_not}")
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
            if raw[-1]["outcome"] == "went on":
                shutil.rmtree(home)
    print("", *table(raw), "", f"what did not go on lies in {folder}", sep="\n")
    if args.keep:
        print(f"kept in {keep(kept_folder(args.keep), raw, machine('fp32', load_before))}")
    return 0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SYSTEMS)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--torchft", metavar="PYTHON", default="", help="an interpreter that has torchft")
    parser.add_argument("--keep", metavar="NAME", help="add the numbers to bench/DATE-NAME")
    args = parser.parse_args()
    if args.only == "torchft" and not args.torchft:
        parser.error("--only torchft needs --torchft PYTHON")
    return args


def attempt(kind: Kind, number: int, folder: Path, data: Path) -> Try:
    """One try.

    outcome  went on, hung (no step within 60 s), ended, or did not heal (three workers do not train again within 60 s)
    seconds  from just before the fault to the first step without those it met
    whole_s  the same, until three train again
    """
    chance = random.Random(f"{kind.fault} {number}")
    result: Try = {"system": kind.system, "fault": kind.fault, "try": number, "outcome": "went on"}
    subject = kind.begin(folder, data)
    try:
        if not wait(subject.ready, subject.over, READY_S):
            return result | {"outcome": f"never came to step {AFTER}"}
        time.sleep(chance.uniform(0.0, 0.5))
        began_s = time.monotonic()
        result |= subject.strike(chance, even=number % 2 == 0)
        result["step_s"] = round(subject.step_s, 4)
        if not wait(subject.back, subject.over, PATIENCE_S):
            return result | {"outcome": "ended" if subject.over() else "hung"}
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
    yield row("whose", "what happens", "tries", "median", "worst", "not", "whole", "step", "times", "goal", "met")
    yield row("---", "---", "---:", "---:", "---:", "---:", "---:", "---:", "---:", "---", "---")
    ours: float | None = None
    for kind in kinds("any"):
        tries = [one for one in raw if (one["system"], one["fault"]) == (kind.system, kind.fault)]
        seconds, whole, step = (numbers(tries, name) for name in ("seconds", "whole_s", "step_s"))
        failed = sum(one["outcome"] != "went on" for one in tries)
        if not seconds:
            if tries:
                yield row(kind.system, kind.fault, str(len(tries)), "", "", str(failed), "", "", "", "", "")
            continue
        step_s, middle = median(step), median(seconds)
        ours = middle if ours is None and kind.system == "lockstep" else ours
        goal_s = kind.goal_s + kind.steps * step_s
        cells = [f"{middle:.3f} s", f"{max(seconds):.3f} s", str(failed), f"{median(whole):.1f} s" if whole else "", f"{step_s:.3f} s"]
        promised = [f"<= {goal_s:.2f} s", "yes" if middle <= goal_s and not failed else "no"] if kind.goal_s else ["", ""]
        yield row(kind.system, kind.fault, str(len(tries)), *cells, f"{middle / ours:.1f}" if ours else "", *promised)


def row(*cells: str) -> str:
    widths = (8, 44, 5, 9, 9, 4, 7, 7, 6, 9, 4)
    left = {0, 1, 9, 10}
    texts = [f"{cell:{'<' if place in left else '>'}{width}}" for place, (cell, width) in enumerate(zip(cells, widths, strict=True))]
    return f"| {' | '.join(texts)} |"


def numbers(tries: Sequence[Try], name: str) -> list[float]:
    """Those of the tries that have one."""
    return [value for one in tries if isinstance(value := one.get(name), float)]


def keep(folder: Path, raw: Sequence[Try], about: str) -> Path:
    """Add to the folder of a measurement."""
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in raw)
    for name, text in (("command", f"python bench/failover.py {' '.join(sys.argv[1:])}\n"), ("machine", about), ("raw.jsonl", lines)):
        with open(folder / name, "a") as file:
            file.write(text)
    shown = "\n".join(table([json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines()]))
    how = "How each is measured: [bench/README.md](../README.md)."
    (folder / "README.md").write_text(f"# {folder.name}\n\n```\n{(folder / 'machine').read_text()}```\n\n{shown}\n\n{how}\n")
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
