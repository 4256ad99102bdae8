"""Everything that only a GPU can show, in under nine minutes on one: tests, bits, healing, speed.

    make gpu-check                              on a machine with GPUs; keeps bench/gpu/DATE-cuda/
    python -m bench.gpu.check --device cpu      the same commands at a tiny size, with gloo; the tests run this

With several GPUs the workers have one each and use NCCL. On a single GPU two workers share it: through gloo, and through NCCL
where it allows that (since 2.30, with NCCL_MULTI_RANK_GPU_ENABLE=1; start nvidia-cuda-mps-control first for kernels at the same time).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from bench.results import TOP, keep, machine

NCCL_THAT_SHARES_GPUS = 23000
PUBLISHED = """
Published by torchtitan for Llama 3.1 8B on 8 H100 with FSDP in bf16: 5,762 tokens per second and GPU, 6,667 with torch.compile,
33% and 39% of the datasheet's FLOP/s (benchmarks/llama3_h100_202412_torchtitan.md). There is no figure for the 1B shape: compare MFU.
"""
Values = dict[str, object]
TRANSLATOR: Values = {
    "data.pairs": 3000,
    "data.held_out": 50,
    "tokenizer.vocab_size": 500,
    "model.dim": 32,
    "batch.tokens": 256,
}
CHATS: Values = {
    "task": "sft",
    "data.kind": "drills",
    "data.pairs": 400,
    "data.held_out_share": 0.1,
    "tokenizer.vocab_size": 400,
}
CHATS |= {"llama.size": "1M", "batch.seq_len": 128, "batch.tokens": 512, "batch.micro_batches": 4}
SMALL: Values = {"evaluate.at_end": 0, "checkpoint.every_steps": 5, "parallel.bucket_bytes": 50_000}


@dataclass
class Part:
    """Commands, one after the other, and the result of the last one. Parts of one `group` must
    print the same digest. alone: nothing else may use the device meanwhile."""

    name: str
    commands: list[list[str]]
    environ: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    alone: bool = False
    exit_code: int = -1
    seconds: float = 0.0
    answer: str = ""

    def run(self, limit_s: float) -> None:
        start_s = time.monotonic()
        for words in self.commands:
            self._run(words, limit_s - (time.monotonic() - start_s))
            if self.exit_code:
                break
        self.seconds = time.monotonic() - start_s
        print(f"{self.name}: exit code {self.exit_code}, {self.seconds:.0f} s", flush=True)
        if self.exit_code:
            print(self.answer, flush=True)

    def _run(self, words: list[str], limit_s: float) -> None:
        environ = {**os.environ, **self.environ}
        try:
            done = subprocess.run(
                words,
                cwd=TOP,
                env=environ,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
            self.exit_code = done.returncode
            shown = done.stdout if not done.returncode else done.stdout + done.stderr
            self.answer = shown[-4000:]
        except subprocess.TimeoutExpired as error:
            self.exit_code = -1
            shown = "".join(
                str(part, errors="replace") for part in (error.stdout, error.stderr) if part
            )
            self.answer = f"{shown[-4000:]}no end within {limit_s:.0f} s"


def lockstep(*words: str | Path, **values: object) -> list[str]:
    """Return a command with `values` of the run."""
    return [sys.executable, "-m", "lockstep", *map(str, words), *options_of(values)]


def options_of(values: Mapping[str, object]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def nccl_version() -> int:
    """Return the version of the NCCL that torch has loaded, as 23004 for 2.30.4.
    torch.cuda.nccl.version() is the one it was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def worker_groups(device: str) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Yield (name, workers, environment) of each way in which workers can run here."""
    if device == "cpu":
        yield "gloo", 2, {"LOCKSTEP_DEVICE": "cpu"}
        return
    if (gpus := torch.cuda.device_count()) > 1:
        yield "nccl", min(gpus, 4), {"LOCKSTEP_DEVICE": "cuda"}
    yield "gloo on one GPU", 2, {"LOCKSTEP_DEVICE": "cuda:0"}
    if nccl_version() >= NCCL_THAT_SHARES_GPUS:
        yield "nccl on one GPU", 2, {"LOCKSTEP_DEVICE": "cuda:0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def parts(device: str, folder: Path) -> Iterator[Part]:
    """Yield the parts; the tests come first."""
    if device == "cuda":
        yield Part("tests", [[sys.executable, "-m", "pytest", "-q", "tests/gpu"]])
    alone = {"LOCKSTEP_DEVICE": "cuda:0" if device == "cuda" else "cpu"}
    runs = [("one worker", 1, alone, 1)]
    for name, workers, environ in worker_groups(device):
        runs += [
            (f"{workers} workers, {name}", workers, environ, 1),
            (f"2 shards, {name}", 2, environ, 2),
        ]
    tasks = {"chats": CHATS, "translator": TRANSLATOR} if device == "cuda" else {"chats": CHATS}
    for task, values in tasks.items():
        for name, workers, environ, shards in runs:
            out = folder / f"{task} {name}"
            options = {**values, **SMALL, "steps": 5, "layout.shard": shards}
            train = lockstep("train", "--out", out, "--workers", str(workers), **options)
            digest = lockstep("checkpoint", "digest", out)
            yield Part(f"{task}, {name}", [train, digest], environ, group=task)
    steps, faults = ("30", "1") if device == "cpu" else ("40", "1")
    for name, workers, environ in worker_groups(device):
        drill = lockstep("drill", "--workers", str(workers), "--faults", faults, "--steps", steps)
        values = {**TRANSLATOR, **SMALL, "out": folder / f"drill {name}"}
        yield Part(f"kills, {name}", [[*drill, *options_of(values)]], environ)
    words = [sys.executable, "-m", "bench.llama.gpu", "--device", device, "--json"]
    if device == "cpu":
        tiny = {"shape": "1M", "rows": 1, "length": 64, "steps": 2, "warm": 1}
        words += [*options_of(tiny), "--no-compile"]
    for loop in ("lockstep", "plain"):
        yield Part(f"throughput, {loop}", [[*words, "--loop", loop]], alone=True)


def differences(done: list[Part]) -> list[str]:
    """Return the groups whose parts print different digests."""
    answers: dict[str, set[str]] = {}
    for part in done:
        if part.group:
            answers.setdefault(part.group, set()).add(part.answer.strip())
    return [f"{group}: {len(found)} digests" for group, found in answers.items() if len(found) > 1]


def table(done: list[Part], different: list[str]) -> str:
    lines = ["| part | exit code | seconds | result |", "| --- | --- | --- | --- |"]
    for part in done:
        last = part.answer.strip().splitlines()[-1:] or [""]
        if part.alone and not part.exit_code:
            values = json.loads(last[0])
            share, rate, memory = (
                values[key]
                for key in ("mfu_of_datasheet", "tokens_per_second", "peak_memory_bytes")
            )
            mfu = (
                f"{share:.1%} of the datasheet"
                if share
                else f"{values['mfu']:.1%} of a matrix product"
            )
            last = [f"{rate:,.0f} tokens/s, {mfu}, {memory / 2**30:.1f} GiB, {values['device']}"]
        lines.append(
            f"| {part.name} | {part.exit_code} | {part.seconds:.0f} | {last[0][:120].replace('|', ' ')} |"
        )
    return "\n".join([*lines, "", "Different bits: " + ("; ".join(different) or "none"), PUBLISHED])


def main() -> int:
    """Run all parts; return 1 if one failed or bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--only",
        default="",
        help="parts whose name contains one of these words, separated by commas",
    )
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each part")
    parser.add_argument(
        "--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="parts at once"
    )
    parser.add_argument("--keep", default="", help="keep the result in bench/gpu/DATE-NAME")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch sees no GPU: check nvidia-smi and the build of torch, or try --device cpu"
        )
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-check-") as folder:
        named = parts(args.device, Path(folder))
        done = [part for part in named if any(word in part.name for word in args.only.split(","))]
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda part: part.run(args.limit), (p for p in done if not p.alone)))
        for part in done:
            if part.alone:
                part.run(args.limit)
    different = differences(done)
    text = table(done, different)
    print(text)
    if args.keep:
        keep(args.keep, map(asdict, done), text, machine("bf16", load))
    return int(bool(different) or any(part.exit_code for part in done))


if __name__ == "__main__":
    sys.exit(main())
