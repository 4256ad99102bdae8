"""Start a contestant as two processes of one thread, and collect its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.results import TOP
from bench.step.contests import HERE, LOCKSTEP, Contestant
from lockstep.config.saved_run import to_json
from lockstep.config.schema import ResolvedRun
from lockstep.corpus.encoded_pairs import open_prepared
from lockstep.tasks.translation import make_order

WORKERS = 2


class Failed(Exception):
    """A contestant exited with an error."""


@dataclass(frozen=True)
class Answer:
    """Seconds of each step, with the target tokens and the pairs that both processes trained in it; warm-up steps are in it."""

    seconds: list[float]
    tokens: list[int]
    pairs: list[int]

    def json(self) -> dict[str, list[float] | list[int]]:
        return asdict(self)


def start(
    contestant: Contestant,
    resolved: ResolvedRun,
    data: Path,
    folder: Path,
    environ: dict[str, str],
    limit_s: float,
) -> Answer:
    """Run the contestant to its end in an empty `folder` over the prepared corpus in `data`. Failed with what it printed."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(to_json(resolved)))
    if contestant.script == LOCKSTEP:
        out = folder / "out"
        out.mkdir()
        (out / "data").symlink_to(data)
        lockstep = [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            "--out",
            str(out),
            "--workers",
            str(WORKERS),
        ]
        run([*lockstep, *as_flags(resolved)], folder, environ, limit_s)
        return read_metrics(out, resolved)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORKERS),
    ]
    run(
        [
            *torchrun,
            str(HERE / contestant.script),
            str(folder / "run.json"),
            str(data),
            str(folder),
        ],
        folder,
        environ,
        limit_s,
    )
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    together = {
        name: [sum(row) for row in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ("tokens", "pairs")
    }
    return Answer(ranks[0]["seconds"], together["tokens"], together["pairs"])


def run(command: list[str], folder: Path, environ: dict[str, str], limit_s: float) -> None:
    """Wait for the command; what it prints goes to folder/log. Its own children end with it: it is asked to stop before it is killed."""
    path = os.pathsep.join(
        [str(TOP / "src"), str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    its = (
        os.environ | environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    )
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=its)
        try:
            code = process.wait(timeout=limit_s)
        except BaseException:
            process.terminate()
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if code:
        raise Failed(
            f"{' '.join(command)}\nended with {code}:\n{(folder / 'log').read_text()[-8000:]}"
        )


def as_flags(resolved: ResolvedRun) -> list[str]:
    """Return every value that differs from its default as options of `lockstep train`."""
    words = []
    values = flat(to_json(resolved)["values"])
    for key, origin in resolved.origin.items():
        if origin != "default":
            value = values[key]
            words += [
                f"--{key}",
                ",".join(value) if isinstance(value, list) else json.dumps(value).strip('"'),
            ]
    return words


def flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        found |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found


def read_metrics(out: Path, resolved: ResolvedRun) -> Answer:
    """The answer that `lockstep train` leaves in metrics.jsonl; pairs, which it does not count, follow from its order."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    order = make_order(resolved.run, open_prepared(out / "data"))
    pairs = [
        sum(len(order.ids(step, k)) for k in range(order.micro_batches))
        for step in range(len(lines))
    ]
    return Answer([line["seconds"] for line in lines], [line["tokens"] for line in lines], pairs)
