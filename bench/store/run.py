"""The overhead of mirroring a run into an object store on its steps, and the time to resume on another host.

    python -m bench.store.run                    a Llama on two workers, 8 pairs of cycles, about 10 minutes on two cores
    python -m bench.store.run --pairs 2 --keep NAME

One run, `lockstep train --out s3://runs/bench`, with moto's HTTP server on the same machine (it shares the
processors: an upper bound). A checkpoint is due every CYCLE steps. During every second cycle the process that mirrors is stopped
(SIGSTOP), so that both kinds of cycles save and only one uploads. The overhead is the mean step of a cycle with the mirror over that of
the next one without; the median over the pairs counts. The first pair is ignored.

The processor seconds of that process are recorded beside those of the agent and the workers: they depend less on other programs.

Then all processes are killed and the same command starts with an empty cache, as on another host: seconds until its first step, of which
the wait for the silent owner is 5 beats.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from support.object_store import environment, s3_server

from bench.results import keep, machine

CYCLE, RUN = 20, "s3://runs/bench"
FLAGS = {
    **{
        "task": "translate",
        "data.pairs": 3000,
        "data.held_out": 50,
        "tokenizer.vocab_size": 500,
        "evaluate.at_end": 0,
    },
    **{
        "model.dim": 256,
        "model.encoder_layers": 4,
        "model.decoder_layers": 4,
        "model.ffn_dim": 1024,
        "batch.tokens": 256,
    },
    **{"checkpoint.every_steps": CYCLE, "checkpoint.keep": 1, "track.every_s": 1000},
}


def command(steps: int) -> list[str]:
    flags = [word for key, value in FLAGS.items() for word in (f"--{key}", str(value))]
    return [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "--workers",
        "2",
        "--steps",
        str(steps),
        "--out",
        RUN,
        *flags,
    ]


def lines(cache: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file of the working copy; [] before it exists."""
    paths = [path for path in cache.glob(f"*/*/{name}") if ".partial" not in str(path)]
    return [
        json.loads(line)
        for path in paths
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]


def wait_for_step(cache: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    while not any(line["step"] >= step for line in lines(cache, "metrics.jsonl")):
        if process.poll() is not None:
            raise SystemExit(f"the run ended with exit code {process.returncode}")
        time.sleep(0.02)


def measure(pairs: int, base: Path, address: str) -> list[dict[str, Any]]:
    steps, rows = 2 * CYCLE * (pairs + 2), list[dict[str, Any]]()
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment(address, base / "a")}
    del env["LOCKSTEP_STORE_BEAT_S"]
    process = subprocess.Popen(command(steps), env=env)
    for cycle in range(1, 2 * pairs + 2):
        wait_for_step(base / "a", cycle * CYCLE, process)
        if cycle % 2:  # the next cycle has no mirror
            os.kill(process.pid, signal.SIGSTOP)
        else:
            os.kill(process.pid, signal.SIGCONT)
    metrics = {line["step"]: line["seconds"] for line in lines(base / "a", "metrics.jsonl")}
    uploads = [line for line in lines(base / "a", "events.jsonl") if line["event"] == "uploaded"]
    for pair in range(1, pairs):
        start = 2 * pair * CYCLE
        with_s, without_s = (
            mean(metrics[step] for step in range(first + 1, first + CYCLE + 1))
            for first in (start, start + CYCLE)
        )
        rows.append(
            {"pair": pair, "with_s": with_s, "without_s": without_s, "ratio": with_s / without_s}
        )
    rows.append(
        {
            "uploads": len(uploads),
            "upload_s": median(line["seconds"] for line in uploads),
            "bytes": uploads[-1]["bytes"],
        }
    )
    times = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    mirror_s, *training_s = [sum(child.cpu_times()[:2]) for child in times]
    rows.append({"mirror_cpu_s": mirror_s, "training_cpu_s": sum(training_s)})
    for child in [
        *psutil.Process(process.pid).children(recursive=True),
        psutil.Process(process.pid),
    ]:
        child.kill()
    process.wait()
    start_s = time.monotonic()
    other = subprocess.Popen(command(steps), env=env | {"LOCKSTEP_STORE_CACHE": str(base / "b")})
    last = max(line["step"] for line in uploads)
    while not lines(base / "b", "metrics.jsonl"):
        time.sleep(0.02)
    downloaded_s = time.monotonic() - start_s
    generation = max(line["generation"] for line in lines(base / "b", "metrics.jsonl"))
    while not any(
        line["step"] == last + 1 and line["generation"] > generation
        for line in lines(base / "b", "metrics.jsonl")
    ):
        time.sleep(0.02)
    rows.append({"resume_s": time.monotonic() - start_s, "until_downloaded_s": downloaded_s})
    other.terminate()
    other.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--keep", default="", metavar="NAME")
    args = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder, s3_server() as address:
        rows = measure(args.pairs + 1, Path(folder), address)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    spread = f"median of {len(ratios)} pairs, {min(ratios) - 1:+.3f} to {max(ratios) - 1:+.3f}"
    text = [f"overhead of the mirror on a step: {median(ratios) - 1:+.3f} ({spread})"]
    text += [json.dumps(row) for row in rows if "ratio" not in row]
    print("\n".join(text))
    if args.keep:
        keep(args.keep, rows, "\n".join(text), machine("fp32, one thread a worker", load))


if __name__ == "__main__":
    main()
