"""What a save costs the training steps around it: a Llama on two workers of one thread each.

    python -m bench.save.run                             100 M parameters (a state of 1.2 GB), 4 saves: about two minutes on two cores
    python -m bench.save.run --shape 25M --saves 3
    python -m bench.save.run --against ../old --rounds 3     another checkout's code in turn with this one
    python -m bench.save.run --keep NAME                 keep bench/save/DATE-NAME/

A real ReplicaGroup and Checkpointer. Every 5th step is saved. A step counts as quiet when no checkpoint was being written from its
start to its end. All figures are of rank 0, which writes. Each is divided by the median of the quiet steps after the same save, and
printed before the next save; the median over the saves counts. The first save is reported separately. Steps during which other
programs had more than --foreign of the processor time of the machine are ignored, and so are saves without a quiet step.

save       the call of Checkpointer.save: compare the replicas, check that the state is finite, copy it
compare    the part of it in the comparison, with the wait for the other worker
copy       the part of it in AsyncSaver.save
next       the step after the save
all steps  what all steps from the save until it is written take longer
processor  seconds of processor time that the write takes
memcpy     a bare copy of the state between buffers that exist, in the same process beside the same steps: a bound for `copy`
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from bench.results import TOP, keep, machine

WORKERS = 2
ROWS = 2  # of LENGTH tokens in a micro-batch, of which a worker has one: a step of 4 to 5 seconds
LENGTH = 256
CYCLE = 5  # steps per save
NAMES = ("save", "compare", "copy", "next", "all steps", "processor", "memcpy", "foreign")
Row = dict[str, Any]


def train(shape: str, saves: int, out: Path) -> None:
    """One worker: train, save, and note the seconds of each step."""
    from lockstep.checkpoint.async_save import AsyncSaver
    from lockstep.elastic.runtime import ElasticRuntime
    from lockstep.models.llama import build_llama
    from lockstep.models.llama_config import LLAMA_CONFIGS
    from lockstep.training.checkpointer import Checkpointer
    from lockstep.training.replica_group import ReplicaGroup

    torch.set_num_threads(1)
    parts: Row = {}
    AsyncSaver.save = timed(AsyncSaver.save, "copy_s", parts)  # type: ignore[method-assign]
    ReplicaGroup.replicas_identical = timed(ReplicaGroup.replicas_identical, "compare_s", parts)  # type: ignore[method-assign]
    config, rows = LLAMA_CONFIGS[shape], list[Row]()
    with ElasticRuntime.join() as runtime:
        model = build_llama(config, device=torch.device("cpu"), seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        with (
            Checkpointer(
                out / "checkpoints", runtime, model, optimizer, every_steps=CYCLE, keep=1
            ) as checkpointer,
            ReplicaGroup(
                runtime, model, checkpointer, micro_batches=WORKERS, rehearse=False
            ) as replicas,
        ):
            checkpointer.resume()
            (out / f"pid-{runtime.world.rank}").write_text(str(os.getpid()))
            for step in range(CYCLE * (saves + 1) - 1):
                saver = checkpointer.saver
                writing, start_s = bool(saver and saver.writing), time.perf_counter()
                start_cpu_s, start_foreign_s = time.process_time(), foreign_s(out)
                for k in replicas.micro_batches(step):
                    generator = torch.Generator().manual_seed(1000 * step + k)
                    tokens = torch.randint(
                        0, config.vocab_size, (ROWS, LENGTH + 1), generator=generator
                    )
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = replicas(tokens[:, :-1], tokens[:, 1:].contiguous())
                    replicas.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                row: Row = {
                    "step": step,
                    "step_s": time.perf_counter() - start_s,
                    "writing": writing,
                }
                row["cpu_s"] = time.process_time() - start_cpu_s
                row["foreign"] = (
                    (foreign_s(out) - start_foreign_s) / row["step_s"] / psutil.cpu_count()
                )
                if checkpointer.due(step + 1):
                    start_s = time.perf_counter()
                    checkpointer.save(step + 1)
                    row |= {"save_s": time.perf_counter() - start_s, **parts}
                if step > CYCLE and (step + 2) % CYCLE == 0 and runtime.world.leader:
                    row["memcpy_s"] = bare_copy_s(checkpointer.state_dict())
                rows.append(row)
                if "memcpy_s" in row:
                    print(json.dumps(ratios(rows[-CYCLE:], 1.0)), flush=True)
    if runtime.world.rank == 0:
        (out / "rows.json").write_text(json.dumps(rows))


def foreign_s(out: Path) -> float:
    """Processor seconds of all programs on this machine except the workers."""
    machine_s = sum(psutil.cpu_times()[:3])  # user, nice, system
    workers = [psutil.Process(int(path.read_text())).cpu_times() for path in out.glob("pid-*")]
    return machine_s - sum(worker.user + worker.system for worker in workers)


def timed(function: Callable[..., Any], name: str, seconds: Row) -> Callable[..., Any]:
    """Return `function`, with the seconds of its last call in seconds[name]."""

    def call(*args: Any, **options: Any) -> Any:
        start_s = time.perf_counter()
        result = function(*args, **options)
        seconds[name] = time.perf_counter() - start_s
        return result

    return call


SPARE: dict[str, torch.Tensor] = {}


def bare_copy_s(tensors: dict[str, torch.Tensor]) -> float:
    """Seconds to copy the state into buffers that have been written before."""
    seconds = 0.0
    for _ in range(1 if SPARE else 2):
        start_s = time.perf_counter()
        for name, tensor in tensors.items():
            if name not in SPARE or SPARE[name].shape != tensor.shape:
                SPARE[name] = torch.empty_like(tensor)
            SPARE[name].copy_(tensor)
        seconds = time.perf_counter() - start_s
    return seconds


def run(shape: str, saves: int, checkout: Path) -> list[Row]:
    """Start the workers with the code of `checkout`; return the rows of rank 0."""
    with tempfile.TemporaryDirectory(dir=TOP) as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [
            sys.executable,
            "-m",
            "bench.save.run",
            "--shape",
            shape,
            "--saves",
            str(saves),
            "--worker",
            folder,
        ]
        common = {
            **os.environ,
            "PYTHONPATH": str(checkout / "src"),
            "WORLD_SIZE": str(WORKERS),
            "LOCAL_WORLD_SIZE": str(WORKERS),
            "MASTER_ADDR": "127.0.0.1",
        }
        common |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        common |= {
            "MALLOC_MMAP_THRESHOLD_": "2000000000",
            "MALLOC_TRIM_THRESHOLD_": "4000000000",
        }  # as the fork server sets them
        environments = [
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORKERS)
        ]
        workers = [
            subprocess.Popen(command, cwd=TOP, env=environment, start_new_session=True)
            for environment in environments
        ]
        if any([worker.wait() for worker in workers]):
            raise SystemExit("a worker failed")
        return list(json.loads((Path(folder) / "rows.json").read_text()))


def ratios(cycle: list[Row], foreign: float) -> Row:
    """Return the ratios of a save; nothing if other programs disturbed it. cycle: its steps."""
    saved, *after = cycle
    after = [row for row in after if row["foreign"] <= foreign]
    quiet = [row for row in after if not row["writing"]]
    if not quiet or after[0] is not cycle[1]:
        return {}
    quiet_s = median(row["step_s"] for row in quiet)
    quiet_cpu_s = median(row["cpu_s"] for row in quiet)
    during = [row for row in after if row["writing"]]
    seconds = {
        "save": saved["save_s"],
        "compare": saved["compare_s"],
        "copy": saved["copy_s"],
        "next": after[0]["step_s"],
        "all steps": sum(row["step_s"] - quiet_s for row in during),
        "processor": sum(row["cpu_s"] - quiet_cpu_s for row in during),
        "memcpy": cycle[-1]["memcpy_s"],
    }
    line = {name: round(value / quiet_s, 4) for name, value in seconds.items()}
    line["foreign"] = round(median(row["foreign"] for row in after), 4)
    return {"step": saved["step"], "quiet_s": round(quiet_s, 3), **line}


def table_row(name: str, lines: list[Row]) -> str:
    columns = [sorted(line[column] for line in lines) for column in NAMES]
    cells = [f"{median(c):.3f} ({c[0]:.3f} to {c[-1]:.3f})" for c in columns]
    quiet_s = median(line["quiet_s"] for line in lines)
    return f"| {name} | {quiet_s:.2f} s | {len(lines)} | {' | '.join(cells)} |"


def table(rows: list[Row], foreign: float) -> str:
    lines = [
        f"| code | quiet step | saves | {' | '.join(NAMES)} |",
        f"| --- |{' ---: |' * (len(NAMES) + 2)}",
    ]
    for code in dict.fromkeys(row["code"] for row in rows):
        of_code = [row for row in rows if row["code"] == code]
        starts = [index for index, row in enumerate(of_code) if "save_s" in row]
        saves = [ratios(of_code[start : start + CYCLE], foreign) for start in starts]
        first = [line for line in saves if line and line["step"] < CYCLE]
        later = [line for line in saves if line and line["step"] > CYCLE]
        lines += [table_row(f"{code}, first save", first)] if first else []
        lines += [table_row(f"{code}, later saves", later)] if later else []
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="100M")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", type=Path, help="a checkout of other code")
    parser.add_argument(
        "--foreign",
        type=float,
        default=1.0,
        help="most processor time of other programs in a step that counts",
    )
    parser.add_argument("--keep", metavar="NAME")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args.shape, args.saves, args.worker)
        return 0
    load, rows = os.getloadavg(), list[Row]()
    checkouts = {"before": args.against, "after": TOP} if args.against else {"this": TOP}
    for _ in range(args.rounds):
        for code, checkout in checkouts.items():
            print(code, flush=True)
            rows += [{"code": code, **row} for row in run(args.shape, args.saves, checkout)]
    shown = table(rows, args.foreign)
    print(shown)
    if args.keep:
        keep(args.keep, rows, shown, machine("bf16 products, one thread a worker", load))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
