"""Loss of the default recipe with each wire format, and with int8 rounded to nearest, without random numbers.

    python -m bench.wire.loss --small             a small model, three seeds, a few minutes on one core
    python -m bench.wire.loss --keep NAME         the default recipe, three seeds, an hour on one core

One process trains: the bits do not depend on the number of workers. All formats see the same samples in each step, so the losses are
compared step by step. A row has the mean loss of the last fifth of the steps, and its difference from fp32 in percent.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from support.ranks import run_ranks

from bench.results import keep, machine
from lockstep.config.saved_run import open_run
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.network.wire_format import FORMATS
from lockstep.parallel import wire_sum
from lockstep.recipes.script import lock_run_folder, train
from lockstep.record.metrics import read_metrics

NEAREST = "int8 to nearest"
SMALL = {
    "model.dim": 64,
    "model.ffn_dim": 128,
    "model.encoder_layers": 1,
    "model.decoder_layers": 1,
}
SMALL |= {"data.pairs": 3000, "data.held_out": 50, "tokenizer.vocab_size": 500, "batch.tokens": 128}
NAMES = (*FORMATS, NEAREST)


def losses(
    runtime: ElasticRuntime, folder: str, name: str, seed: int, steps: int, small: bool
) -> list[float]:
    """Train the default recipe; return the loss of each step."""
    path = Path(folder)
    if name == NEAREST:
        wire_sum.NOISE = 0.0
    values = {
        "steps": steps,
        "seed": seed,
        "parallel.wire": name.split()[0],
        "evaluate.at_end": 0,
        "checkpoint.every_steps": 0,
    }
    values |= SMALL if small else {}
    resolved = open_run(path, None, {key: str(value) for key, value in values.items()}, {})
    with lock_run_folder(path, resolved):
        pass
    train(resolved, path, runtime)
    return [line["loss"] for line in read_metrics(path / "metrics.jsonl")]


def table(lines: list[dict[str, Any]]) -> str:
    rows = ["| seed | format | loss at the end | against fp32 |", "| ---: | --- | ---: | ---: |"]
    plain: dict[int, float] = {}
    for line in lines:
        at_end = mean(line["losses"][-max(1, len(line["losses"]) // 5) :])
        plain.setdefault(line["seed"], at_end)
        rows.append(
            f"| {line['seed']} | {line['format']} | {at_end:.4f} | {100 * (at_end / plain[line['seed']] - 1):+.2f}% |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--keep", metavar="NAME", default="")
    args = parser.parse_args()
    load_before, lines = os.getloadavg(), list[dict[str, Any]]()
    for seed in map(int, args.seeds.split(",")):
        for name in NAMES:
            with tempfile.TemporaryDirectory(prefix="lockstep-wire-") as folder:
                (of_steps,) = run_ranks(
                    losses, 1, folder, name, seed, args.steps, args.small, timeout_s=3600
                )
            lines.append(
                {"seed": seed, "format": name, "losses": [round(loss, 6) for loss in of_steps]}
            )
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))
    if args.keep:
        keep(
            args.keep,
            lines,
            table(lines),
            machine("as chosen by compute.precision=auto", load_before),
        )


if __name__ == "__main__":
    main()
