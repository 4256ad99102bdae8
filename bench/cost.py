"""What it costs that a training could heal, as long as nothing fails: the same run with all of it and without.

    python bench/cost.py                         both sizes, ten repetitions each, the two ways in turn
    python bench/cost.py --size small --tries 20
    python bench/cost.py --at-once               both ways at the same time, so that whatever else the machine does disturbs both alike
    python bench/cost.py --keep cost             kept under bench/DATE-cost

with      `lockstep train`: an agent, a zygote, a member thread that beats, the log, the board, all weights compared at every step
without   the same workers started by torchrun, `heal.verify_every = 0`: none of that; the vote of a step stays, which carries its loss

Two measures, both from after the first steps to the last: seconds of a step (median), and seconds of processor a step, of the workers and
of whatever looks after them (of torchrun itself nothing is counted). On a machine that does other things besides only the second is steady,
and that only at once: a processor that is shared is as much faster or slower from one minute to the next as what is looked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
from failover_subjects import TINY
from group import as_flags
from run import keep, machine

from lockstep.config import Resolved, resolve
from lockstep.data.prepare import prepare

WORKERS = 2
WAYS = ("with", "without")
BOUND = 1.02
LIMIT_S = 900.0
SIZES: dict[str, tuple[int, int, dict[str, object]]] = {  # steps before the first that counts, and the last; values
    "default": (4, 16, {"evaluate.at_end": 0, "save.every_steps": 0}),
    "small": (20, 200, {**TINY, "save.every_steps": 0}),
}


@dataclass(frozen=True)
class Try:
    """One training. step_s: median; cpu_s: of a step, of all processes together."""

    size: str
    way: str
    number: int
    step_s: float
    cpu_s: float
    load: float


def resolved_for(size: str) -> Resolved:
    """The run of a size."""
    _, steps, values = SIZES[size]
    return resolve(None, {"steps": str(steps), **{key: str(value) for key, value in values.items()}})


def attempt(size: str, way: str, number: int, folder: Path, data: Path) -> Try:
    """Train once. RuntimeError with what it printed when it does not end well."""
    first, last, _ = SIZES[size]
    out = folder / "out"
    out.mkdir(parents=True)
    (out / "data").symlink_to(data)
    words = ["-m", "lockstep", "train", "--out", str(out), *as_flags(resolved_for(size))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    command = [*words, "--workers", str(WORKERS)] if way == "with" else [*torchrun, *words, "--heal.verify_every", "0"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
        )
        began = wait_for(out, first, process, way)
        ended = wait_for(out, last - last // 10 - 1, process, way)  # while all of them are there
        code = process.wait(LIMIT_S)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    if code or len(steps) != last:
        raise RuntimeError(f"{' '.join(command)}\nended with {code}:\n{(folder / 'log').read_text()[-4000:]}")
    cpu_s = (ended[1] - began[1]) / (ended[0] - began[0])
    return Try(size, way, number, round(median(step["seconds"] for step in steps[first:]), 5), round(cpu_s, 5), os.getloadavg()[0])


def repetition(size: str, number: int, folder: Path, data: Path, *, at_once: bool) -> Iterator[Try]:
    """Both ways, one after the other, in turn which is first; or at once."""
    ways = WAYS if number % 2 else WAYS[::-1]

    def one(way: str) -> Try:
        return attempt(size, way, number, folder / f"{way}-{number}", data)

    if not at_once:
        yield from map(one, ways)
        return
    with ThreadPoolExecutor(len(ways)) as pool:
        yield from pool.map(one, ways)


def wait_for(out: Path, step: int, process: subprocess.Popen[bytes], way: str) -> tuple[int, float]:
    """(the newest step, seconds of processor until then), as soon as `step` is there."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s and process.poll() is None:
        with suppress(OSError):
            now = (out / "metrics.jsonl").read_bytes().count(b"\n")
            if now >= step:
                return now, cpu_s(process.pid, itself=way == "with")
        time.sleep(0.005)
    return step, float("nan")


def cpu_s(pid: int, *, itself: bool) -> float:
    """Seconds of processor of all that a process has started, and of itself if wanted."""
    total, parent = 0.0, psutil.Process(pid)
    for one in [*parent.children(recursive=True), *([parent] if itself else [])]:
        with suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def table(tries: Sequence[Try]) -> str:
    """As Markdown. A ratio is the median over the repetitions, each of which has both ways one after the other."""
    rows = ["| size | repetitions | step without | step with | times | processor without | with | times (middle half) |"]
    rows += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for size in SIZES:
        both = {way: {one.number: one for one in tries if (one.size, one.way) == (size, way)} for way in WAYS}
        pairs = [(both["with"][number], both["without"][number]) for number in both["with"].keys() & both["without"].keys()]
        if not pairs:
            continue
        wall, cpu = (sorted(getattr(one, name) / getattr(other, name) for one, other in pairs) for name in ("step_s", "cpu_s"))
        cells = [f"{1000 * median(getattr(pair[side], name) for pair in pairs):.1f} ms" for name in ("step_s", "cpu_s") for side in (1, 0)]
        middle = f"{median(cpu):.3f} ({cpu[len(cpu) // 4]:.3f} to {cpu[-1 - len(cpu) // 4]:.3f})"
        rows.append(f"| {size} | {len(pairs)} | {cells[0]} | {cells[1]} | {median(wall):.3f} | {cells[2]} | {cells[3]} | {middle} |")
    return "\n".join(rows)


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--size", choices=tuple(SIZES))
    asked.add_argument("--tries", type=int, default=10)
    asked.add_argument("--at-once", action="store_true")
    asked.add_argument("--keep", metavar="NAME", default="")
    args = asked.parse_args()
    load_before, tries = os.getloadavg(), list[Try]()
    with tempfile.TemporaryDirectory(prefix="lockstep-cost-") as home:
        for size in [args.size] if args.size else SIZES:
            run, data = resolved_for(size).run, Path(home) / size / "data"
            prepare(run.data, run.tokens, data)
            for number in range(args.tries):
                for one in repetition(size, number, Path(home) / size, data, at_once=args.at_once):
                    tries.append(one)
                    print(json.dumps(asdict(one)), flush=True)
    shown = table(tries)
    print(shown)
    if args.keep:
        how = "both ways at once, four workers on the machine" if args.at_once else "one way after the other"
        text = f"{shown}\n\nBound: {BOUND}; {how}. What is measured: `bench/cost.py`."
        keep(args.keep, map(asdict, tries), text, machine("auto", load_before))


if __name__ == "__main__":
    main()
