"""Time a step of a Session on one GPU, and the same loop without it.

    python -m bench.gpu.step                     pairs of processes in turn; prints a table
    python -m bench.gpu.step --device cpu --widths 64 --steps 6 --rounds 1

Each process trains a Transformer encoder of PyTorch's own classes in bf16 autocast. `waits` counts
the places of a step at which the CPU waits for the GPU, as torch reports them, with their lines.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import lockstep
from bench.results import TOP

VOCABULARY = 512
LENGTH = 128
ROWS = 16
LAYERS = 4
WARM_STEPS = 5
COUNTED_STEPS = 4


class Rows(torch.utils.data.Dataset[Tensor]):
    """Random rows of tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(
            0, VOCABULARY, (4096, LENGTH), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


class Encoder(nn.Module):
    """Predict each token from itself: the arithmetic of a language model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, max(width // 64, 1), 4 * width, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Clock:
    """The seconds of each step, with the GPU done at its end, and then the places of waits."""

    def __init__(
        self, device: torch.device, steps: int, profiler: cProfile.Profile | None = None
    ) -> None:
        self.device = device
        self.profiler = profiler
        self.timed_steps = WARM_STEPS + steps
        self.seconds: list[float] = []
        self.waits: Counter[str] = Counter()
        self.began_s = 0.0

    @property
    def all_steps(self) -> int:
        return self.timed_steps + COUNTED_STEPS * (self.device.type == "cuda")

    def step_ends(self) -> None:
        """Record a step. Between timed steps nothing waits that would not wait without this clock:
        only the first and the last synchronize."""
        done = len(self.seconds) + 1
        if done in (WARM_STEPS, self.timed_steps) and self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.profiler and done == WARM_STEPS:
            self.profiler.enable()
        if self.profiler and done == self.timed_steps:
            self.profiler.disable()
        now_s = time.perf_counter()
        self.seconds.append(now_s - self.began_s)
        self.began_s = now_s
        if done == self.timed_steps and self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")

    def step_s(self) -> float:
        timed = self.seconds[WARM_STEPS : self.timed_steps]
        return sum(timed) / len(timed)


def bare(width: int, micro_batches: int, clock: Clock) -> int:
    """Train without Lockstep. Return the number of parameters."""
    torch.manual_seed(0)
    data, model = Rows().rows.to(clock.device), Encoder(width).to(clock.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(clock.all_steps):
        for k in range(micro_batches):
            start = (step * micro_batches + k) * ROWS % (len(data) - ROWS)
            with torch.autocast(clock.device.type, torch.bfloat16):
                loss = model(data[start : start + ROWS])
            (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ends()
    return sum(parameter.numel() for parameter in model.parameters())


def with_session(width: int, micro_batches: int, clock: Clock) -> int:
    """Train the same with a Session."""
    torch.manual_seed(0)
    model = Encoder(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        lockstep.Session(folder, micro_batches=micro_batches) as session,
    ):
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(Rows(), batch_size=ROWS * micro_batches)
        for step in session.steps(clock.all_steps):
            for tokens in loader(step):
                with torch.autocast(clock.device.type, torch.bfloat16):
                    loss = model(tokens)
                session.backward(loss)
            optimizer.step()
            clock.step_ends()
    return sum(parameter.numel() for parameter in model.parameters())


LOOPS: dict[str, Callable[[int, int, Clock], int]] = {"bare": bare, "session": with_session}


def run_loop(loop: str, width: int, micro_batches: int, steps: int, device: str) -> None:
    """Train in this process, and print one line of JSON."""
    clock = Clock(torch.device(device), steps)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        parameters = LOOPS[loop](width, micro_batches, clock)
    for warning in seen:
        if "synchroniz" in str(warning.message):
            name = Path(warning.filename)
            clock.waits[f"{name.parent.name}/{name.name}:{warning.lineno}"] += 1
    waits = {place: count / COUNTED_STEPS for place, count in clock.waits.most_common()}
    print(json.dumps({"parameters": parameters, "step_s": clock.step_s(), "waits": waits}))


def profile(width: int, micro_batches: int, steps: int, device: str) -> None:
    """Print the functions of a Session in which its main thread spends most time, per step."""
    profiler = cProfile.Profile()
    clock = Clock(torch.device(device), steps, profiler)
    with_session(width, micro_batches, clock)
    print(f"{clock.step_s() * 1e3:.2f} ms in a step, with the profiler; {steps} steps")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--widths", type=int, nargs="+", default=[192, 768])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loop", choices=LOOPS, help="run one loop in this process")
    parser.add_argument(
        "--profile", action="store_true", help="print where a Session's main thread spends its time"
    )
    args = parser.parse_args()
    if args.profile:
        profile(args.widths[0], args.micro_batches[0], args.steps, args.device)
        return
    if args.loop:
        run_loop(args.loop, args.widths[0], args.micro_batches[0], args.steps, args.device)
        return
    print("| parameters | micro-batches | bare, ms | session, ms | ratio | waits in a step |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for width in args.widths:
        for micro_batches in args.micro_batches:
            compare(width, micro_batches, args.steps, args.rounds, args.device)


def compare(width: int, micro_batches: int, steps: int, rounds: int, device: str) -> None:
    """Run both loops in turn, and print a row of the table and the places of the waits."""
    answers: dict[str, list[dict[str, float]]] = {loop: [] for loop in LOOPS}
    last = {}
    for _ in range(rounds):
        for loop in LOOPS:
            options = ["--device", device, "--steps", str(steps), "--loop", loop]
            words = [
                sys.executable,
                "-m",
                "bench.gpu.step",
                "--widths",
                str(width),
                "--micro-batches",
                str(micro_batches),
                *options,
            ]
            done = subprocess.run(words, cwd=TOP, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            last[loop] = json.loads(done.stdout.splitlines()[-1])
            answers[loop].append(last[loop])
    bare_s, session_s = (median(answer["step_s"] for answer in answers[loop]) for loop in LOOPS)
    waits = last["session"]["waits"]
    parameters = last["session"]["parameters"] / 1e6
    row = f"| {parameters:.1f} M | {micro_batches} | {bare_s * 1e3:.2f} | {session_s * 1e3:.2f}"
    print(f"{row} | {session_s / bare_s:.3f} | {sum(waits.values()):g} |", flush=True)
    print(f"    waits: {waits}", flush=True)


if __name__ == "__main__":
    main()
