"""Measure what fault tolerance costs while nothing fails: the same run with and without it.

    python -m bench.cost.run                             both sizes, eight starts each, 40 s per variant and start: half an hour
    python -m bench.cost.run --size small --starts 2
    python -m bench.cost.run --keep NAME                 keep bench/cost/DATE-NAME/

with      `lockstep train`: agent, fork server, heartbeats, generation log, status board, weights compared at every step
without   the same workers under torchrun with `elastic.verify_every = 0`. The vote stays, because it carries the loss. The allocator
          settings equal the fork server's; they are worth more than the difference to measure

Both runs are alive at once. One is stopped (SIGSTOP) while the other has both cores for about a second, in the order 1 2 2 1, so that
other load on the machine affects both alike: whole runs a minute apart differ by 10%. The result is the wall seconds in which a variant
was not stopped, and the processor seconds of its workers and of Lockstep's other processes (none of torchrun itself), per step. Each
start is a pair of new trainings, because the placement of memory is worth a percent too. Losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import psutil
from support.hosts import TINY

from bench.results import TOP, keep, machine
from bench.step.contestants import as_flags
from lockstep.agent.forkserver import MALLOC_SETTINGS
from lockstep.config.resolve import resolve
from lockstep.config.schema import ResolvedRun
from lockstep.corpus.encoded_pairs import prepare

WORKERS = 2
WAYS = ("with", "without")
BOUND = 1.02
LIMIT_S = 300.0  # for the first steps
SLICE_S = 1.0  # less than elastic.heartbeat_timeout_s: no member counts as silent meanwhile
STEPS = 1_000_000  # more than any is watched for
SIZES: dict[
    str, tuple[int, dict[str, object]]
] = {  # steps before the first that counts, and values
    "default": (4, {"evaluate.at_end": 0, "checkpoint.every_steps": 0}),
    "small": (20, {**TINY, "checkpoint.every_steps": 0}),
}


@dataclass(frozen=True)
class Count:
    """What one way did in one start. awake_s: not stopped; cpu_s: of all its processes together."""

    size: str
    way: str
    start: int
    steps: int
    awake_s: float
    cpu_s: float
    load: float


@dataclass
class Training:
    """A run in `folder`; `processes` are stopped and continued together."""

    way: str
    folder: Path
    process: subprocess.Popen[bytes]
    processes: list[psutil.Process] = field(default_factory=list)

    def losses(self) -> list[float]:
        """Return the losses of the committed steps. RuntimeError with the run's output if it exited."""
        if self.process.poll() is not None:
            raise self.failed(f"it ended with {self.process.returncode}")
        with suppress(FileNotFoundError):
            whole = (self.folder / "out" / "metrics.jsonl").read_text().rpartition("\n")[0]
            return [json.loads(line)["loss"] for line in whole.splitlines()]
        return []

    def failed(self, what: str) -> RuntimeError:
        """With what the run printed."""
        return RuntimeError(
            f"the run {self.way}: {what}\n{(self.folder / 'log').read_text()[-4000:]}"
        )

    def cpu_s(self) -> float:
        """Seconds of processor until now."""
        counted = self.processes if self.way == "with" else self.processes[1:]
        return sum(sum(one.cpu_times()[:2]) for one in counted)

    def stop(self) -> None:
        """Nothing of it runs afterwards."""
        for one in reversed(self.processes):
            try:
                one.suspend()
            except psutil.NoSuchProcess:
                raise self.failed(f"{one} is gone") from None

    def go_on_for(self, seconds: float) -> float:
        """Let it run for about that long; how long it was."""
        began_s = time.perf_counter()
        for one in self.processes:
            one.resume()
        time.sleep(seconds)
        self.stop()
        return time.perf_counter() - began_s


@contextmanager
def training(size: str, way: str, folder: Path, data: Path) -> Iterator[Training]:
    """Start a run; kill it on exit."""
    out = folder / "out"
    out.mkdir(parents=True)
    (out / "data").symlink_to(data)
    words = ["-m", "lockstep", "train", "--out", str(out), *as_flags(resolved_for(size))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    command = (
        [*words, "--workers", str(WORKERS)]
        if way == "with"
        else [*torchrun, *words, "--elastic.verify_every", "0"]
    )
    environ = {
        **os.environ,
        **MALLOC_SETTINGS,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TOP / "src"),
    }
    with open(folder / "log", "w") as log:
        # start_new_session: the kernel sends SIGHUP to a stopped process whose shell exits
        process = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=log, env=environ, start_new_session=True
        )
    try:
        yield (one := Training(way, folder, process))
    finally:
        for each in one.processes or [psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        process.wait()


def resolved_for(size: str) -> ResolvedRun:
    """The run of a size."""
    return resolve(
        None, {"steps": str(STEPS), **{key: str(value) for key, value in SIZES[size][1].items()}}
    )


def one_start(size: str, number: int, seconds: float, folder: Path, data: Path) -> list[Count]:
    """Both ways from new, in turns of a slice until each was awake for `seconds`. RuntimeError when their losses differ."""
    with ExitStack() as stack:
        ways = WAYS if number % 2 else WAYS[::-1]
        both = [
            stack.enter_context(training(size, way, folder / f"{way}-{number}", data))
            for way in ways
        ]
        until_s = time.monotonic() + LIMIT_S
        while min(len(one.losses()) for one in both) < SIZES[size][0]:
            if time.monotonic() > until_s:
                raise RuntimeError(
                    f"no {SIZES[size][0]} steps within {LIMIT_S:.0f} s; logs in {folder}"
                )
            time.sleep(0.05)
        for one in both:
            parent = psutil.Process(one.process.pid)
            one.processes = [parent, *parent.children(recursive=True)]
            one.stop()
        before = [(len(one.losses()), one.cpu_s()) for one in both]
        awake_s = dict.fromkeys(WAYS, 0.0)
        while min(awake_s.values()) < seconds:
            for one in (*both, *both[::-1]):
                awake_s[one.way] += one.go_on_for(SLICE_S)
        counts, losses = [], [one.losses() for one in both]
        for one, done, (steps, cpu_s) in zip(both, losses, before, strict=True):
            spent_s = round(one.cpu_s() - cpu_s, 3)
            counts.append(
                Count(
                    size,
                    one.way,
                    number,
                    len(done) - steps,
                    round(awake_s[one.way], 3),
                    spent_s,
                    os.getloadavg()[0],
                )
            )
        if unequal := [
            step
            for step, (ours, theirs) in enumerate(zip(*losses, strict=False), 1)
            if ours != theirs
        ]:
            raise RuntimeError(
                f"the two ways differ in their loss from step {unequal[0]} on: not the same training"
            )
        return counts


def table(counts: Sequence[Count]) -> str:
    """As Markdown. A ratio is the geometric mean over the starts, with its standard error."""
    rows = [
        "| size | starts | steps of each | step without | with | times | processor without | with | times |"
    ]
    rows += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for size in SIZES:
        ours, theirs = (
            [one for one in counts if (one.size, one.way) == (size, way)] for way in WAYS
        )
        if not ours:
            continue
        cells = [
            size,
            str(len(ours)),
            str(min(sum(one.steps for one in way) for way in (ours, theirs))),
        ]
        for measure in ("awake_s", "cpu_s"):
            with_s, without_s = (
                [getattr(one, measure) / one.steps for one in way] for way in (ours, theirs)
            )
            cells += [f"{1000 * fmean(without_s):.1f} ms", f"{1000 * fmean(with_s):.1f} ms"]
            logs = [math.log(a / b) for a, b in zip(with_s, without_s, strict=True)]
            error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
            cells.append(f"{math.exp(fmean(logs)):.3f} ± {error:.3f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--size", choices=tuple(SIZES))
    asked.add_argument("--starts", type=int, default=8)
    asked.add_argument("--seconds", type=float, default=40.0, help="of each way, a start")
    asked.add_argument("--keep", metavar="NAME", default="")
    args = asked.parse_args()
    load_before, counts = os.getloadavg(), list[Count]()
    with tempfile.TemporaryDirectory(prefix="lockstep-cost-") as home:
        for size in [args.size] if args.size else SIZES:
            run, data = resolved_for(size).run, Path(home) / size / "data"
            prepare(run.data, run.tokenizer, data)
            for number in range(args.starts):
                for one in one_start(size, number, args.seconds, Path(home) / size, data):
                    counts.append(one)
                    print(json.dumps(asdict(one)), flush=True)
    shown = table(counts)
    print(shown)
    if args.keep:
        explained = f"± is one standard error over the starts. Bound: {BOUND}. Method: the head of `bench/cost/run.py`."
        text = f"{shown}\n\n{explained}"
        keep(args.keep, map(asdict, counts), text, machine("auto", load_before))


if __name__ == "__main__":
    main()
