"""What a save costs the training steps around it: a Llama on two workers of one thread each.

    python -m bench.save.run                             100 M parameters (a state of 1.2 GB), 8 saves, about five minutes on two cores
    python -m bench.save.run --shape 25M --saves 3
    python -m bench.save.run --keep NAME                 keep bench/save/DATE-NAME/

A real ReplicaGroup and Checkpointer. Every 8th step is saved. A step counts as quiet when no checkpoint was being written from its
start to its end, and as a step during the write when one was being written from its start to its end (or at its start, when the write
ends within one step). All figures are of rank 0, which writes. Each is divided by the median of the quiet steps after the same save;
the median over the saves counts. The first save is reported separately. Steps during which other programs had more than --foreign of
the processor time of the machine are ignored, and so are saves without a quiet step and a step during the write.

save       the call of Checkpointer.save: compare the replicas, check that the state is finite, copy it
compare    the part of it in the comparison, with the wait for the other worker
copy       the part of it in AsyncSaver.save
during     the steps during the write
memcpy     a bare copy of the state between buffers that exist, in the same process beside the same steps: a bound for `copy`
processor  seconds of processor time that the write takes, over a quiet step
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

WORKERS, ROWS, LENGTH, CYCLE = 2, 4, 256, 8
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
                row |= {
                    "written": not (saver and saver.writing),
                    "cpu_s": time.process_time() - start_cpu_s,
                }
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


def run(shape: str, saves: int) -> list[Row]:
    """Start the workers; return the rows of rank 0."""
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


def ratios(rows: list[Row], foreign: float) -> list[Row]:
    """Return the ratios of each save."""
    found = []
    for start in range(CYCLE - 1, len(rows), CYCLE):
        saved, *after = rows[start : start + CYCLE]
        after = [row for row in after if row["foreign"] <= foreign]
        quiet = [row for row in after if not row["writing"]]
        if not quiet or (found and len(quiet) == len(after)):
            print(
                f"the save of step {saved['step']} is ignored: {len(quiet)} quiet steps of {len(after)}",
                file=sys.stderr,
            )
            continue
        quiet_s = median(row["step_s"] for row in quiet)
        quiet_cpu_s = median(row["cpu_s"] for row in quiet)
        during = [row for row in after if row["writing"]]
        whole = [row for row in during if not row["written"]] or during[:1]
        line: Row = {"step": saved["step"], "quiet_s": quiet_s}
        line |= {
            name: saved[f"{name}_s"] / quiet_s
            for name in ("save", "compare", "copy")
            if f"{name}_s" in saved
        }
        line["during"] = median(row["step_s"] for row in whole) / quiet_s if whole else 1.0
        line["all steps"] = sum(row["step_s"] - quiet_s for row in during) / quiet_s
        line["steps written in"] = len(during)
        line["processor"] = sum(row["cpu_s"] - quiet_cpu_s for row in during) / quiet_s
        line["memcpy"] = rows[start + CYCLE - 1]["memcpy_s"] / quiet_s
        line["foreign"] = median(row["foreign"] for row in after)
        found.append(line)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="100M")
    parser.add_argument("--saves", type=int, default=8)
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
    load = os.getloadavg()
    rows = run(args.shape, args.saves)
    first, *later = ratios(rows, args.foreign) or [{}]
    if not later:
        raise SystemExit("no save counts: the machine is busy with other programs; see --foreign")
    names = [name for name in first if name not in ("step", "quiet_s")]
    lines = [
        f"| quiet step {median(line['quiet_s'] for line in later):.2f} s | {' | '.join(names)} |"
    ]
    lines += [
        f"| --- |{' ---: |' * len(names)}",
        f"| first save | {' | '.join(f'{first[name]:.3f}' for name in names)} |",
    ]
    cells = [sorted(line[name] for line in later) for name in names]
    lines.append(
        f"| {len(later)} later saves | "
        + " | ".join(f"{median(c):.3f} ({c[0]:.3f} to {c[-1]:.3f})" for c in cells)
        + " |"
    )
    print("\n".join(lines))
    if args.keep:
        keep(args.keep, rows, "\n".join(lines), machine("bf16 products, one thread a worker", load))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
