"""What it costs that a training could heal, as long as nothing fails: the same run with all of it and without.

    python bench/cost.py                         both sizes, ten repetitions each, the two ways in turn
    python bench/cost.py --size small --tries 20
    python bench/cost.py --at-once               both ways at the same time, one worker and one core each, the cores changed in turn
    python bench/cost.py --keep cost             kept under bench/DATE-cost

with      `lockstep train`: an agent, a zygote, a member thread that beats, the log, the board, all weights compared at every step
without   the same workers started by torchrun, `heal.verify_every = 0`: none of that; the vote of a step stays, which carries its loss.
          With the allocator settings that the zygote gives its workers, which are worth more than what is looked for

Two measures, both from after the first steps to the last: seconds of a step (median), and seconds of processor a step, of the workers and
of whatever looks after them (of torchrun itself nothing is counted). On a machine that does other things besides only the second is steady.
At once, whatever else the machine does disturbs both alike; but there is no exchange then, and what looks after a worker shares its core.
What counts is the time in which both train: two cores may be one that is shared, faster for whoever is alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from lockstep.launch import KEEP_MEMORY

WORKERS = 2
WAYS = ("with", "without")
BOUND = 1.02
LIMIT_S = 900.0
SIZES: dict[str, tuple[int, int, dict[str, object]]] = {  # steps before the first that counts, and the last; values
    "default": (4, 24, {"evaluate.at_end": 0, "save.every_steps": 0}),
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


@dataclass(frozen=True)
class Running:
    """One training that was started in `folder`."""

    way: str
    folder: Path
    command: Sequence[str]
    process: subprocess.Popen[bytes]

    @property
    def metrics(self) -> Path:
        return self.folder / "out" / "metrics.jsonl"

    @property
    def steps(self) -> int:
        """How many are done."""
        with suppress(OSError):
            return self.metrics.read_bytes().count(b"\n")
        return 0

    def spent(self) -> tuple[int, float]:
        """(steps done, seconds of processor until then)."""
        return self.steps, cpu_s(self.process.pid, itself=self.way == "with")


def start(size: str, way: str, folder: Path, data: Path, core: int | None = None) -> Running:
    """Begin a training; with `core`, of one worker on that core."""
    out, workers = folder / "out", str(WORKERS if core is None else 1)
    out.mkdir(parents=True)
    (out / "data").symlink_to(data)
    words = ["-m", "lockstep", "train", "--out", str(out), *as_flags(resolved_for(size))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
    command = [*words, "--workers", workers] if way == "with" else [*torchrun, *words, "--heal.verify_every", "0"]
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    environ = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([*pinned, sys.executable, *command], stdout=log, stderr=log, env=environ)
    return Running(way, folder, command, process)


def watch(size: str, number: int, running: Sequence[Running]) -> Iterator[Try]:
    """What they take in the time in which all of them train. RuntimeError with what one printed that does not end well."""
    first, last, _ = SIZES[size]
    began = when(running, lambda steps: min(steps) >= first)
    ended = when(running, lambda steps: max(steps) >= last - last // 10 - 1)
    for one, (begin, before_s), (end, after_s) in zip(running, began, ended, strict=True):
        code = one.process.wait(LIMIT_S)
        steps = [json.loads(line) for line in one.metrics.read_text().splitlines()] if one.metrics.exists() else []
        if code or len(steps) != last:
            raise RuntimeError(f"{' '.join(one.command)}\nended with {code}:\n{(one.folder / 'log').read_text()[-4000:]}")
        step_s = median(step["seconds"] for step in steps[begin:end])
        yield Try(size, one.way, number, round(step_s, 5), round((after_s - before_s) / (end - begin), 5), os.getloadavg()[0])


def when(running: Sequence[Running], done: Callable[[list[int]], bool]) -> list[tuple[int, float]]:
    """What each has spent as soon as `done(the steps of each)`, or one of them has ended."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s and not done([one.steps for one in running]):
        if any(one.process.poll() is not None for one in running):
            break
        time.sleep(0.005)
    return [one.spent() for one in running]


def repetition(size: str, number: int, folder: Path, data: Path, *, at_once: bool) -> Iterator[Try]:
    """Both ways, one after the other, in turn which is first; or at once, in turn which is on which core."""
    ways = WAYS if number % 2 else WAYS[::-1]
    cores = sorted(os.sched_getaffinity(0))[: len(ways)]
    if at_once:
        both = [start(size, way, folder / f"{way}-{number}", data, core) for way, core in zip(ways, cores, strict=True)]
        yield from watch(size, number, both)
        return
    for way in ways:
        yield from watch(size, number, [start(size, way, folder / f"{way}-{number}", data)])


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
        how = "both ways at once, one worker on a core each" if args.at_once else "one way after the other"
        text = f"{shown}\n\nBound: {BOUND}; {how}. What is measured: `bench/cost.py`."
        keep(args.keep, map(asdict, tries), text, machine("auto", load_before))


if __name__ == "__main__":
    main()
