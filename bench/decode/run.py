"""Tokens a second of Llama's decoding: ours, ours compiled, and the `generate` of transformers, on the same random weights.

python -m bench.decode.run                            25 M parameters, fp32 and bf16, 1 and 8 rows
python -m bench.decode.run --shape 5M --no-compile    smaller, without the minutes that compiling takes
python -m bench.decode.run --keep NAME                keep bench/decode/DATE-NAME/
python -m bench.decode.run --layouts                  microseconds of one product in each layout of `choose_layout`

One process, one thread, every subject in turn. A repetition is greedy continuations of PROMPT random tokens, once by one
token and once by TOKENS + 1; the difference is what TOKENS steps of decoding cost. It is taken in CPU time of the thread, which other
processes disturb less than wall time; wall time is in raw.jsonl too. Compilation is not counted; its seconds are printed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.results import keep, machine, result_folder
from lockstep.generation.decoder import Decoder, Matrix, choose_layout
from lockstep.generation.sampling import compile_step, sample_tokens
from lockstep.models.hub import write_hub
from lockstep.models.llama import Llama, build_llama
from lockstep.models.llama_config import LLAMA_CONFIGS, config_to_hf
from lockstep.models.llama_io import load_llama

PROMPT = 32
CPU = torch.device("cpu")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BASE = "transformers, static cache"


def main() -> int:
    """Run what was asked for; 0 when all of it could be run."""
    args = arguments()
    torch.set_num_threads(1)
    if args.layouts:
        print("\n".join(layouts()))
        return 0
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load_before, raw = os.getloadavg(), []
    with tempfile.TemporaryDirectory(prefix="lockstep-decode-") as folder:
        for precision in args.precisions:
            for rows in args.rows:
                raw += race(Path(folder) / precision, args, precision, rows)
    table = "\n".join(rows_of(raw))
    print(f"\n{table}")
    if args.keep:
        what = f"Tokens a second of CPU time, all rows together, {args.shape} parameters; median of {args.repetitions} repetitions."
        kept = keep(
            args.keep, raw, f"{table}\n\n{what}", machine("fp32 and bf16, one thread", load_before)
        )
        print(f"\nkept in {kept}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(LLAMA_CONFIGS), default="25M")
    parser.add_argument(
        "--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS)
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--keep", metavar="NAME", help="write the raw numbers to bench/DATE-NAME")
    args = parser.parse_args()
    if args.keep and (folder := result_folder(args.keep)).exists():
        parser.error(f"{folder} exists; give another name")
    return args


def race(folder: Path, args: argparse.Namespace, precision: str, rows: int) -> list[dict[str, Any]]:
    """A line of raw numbers for each subject and repetition."""
    shape, dtype = LLAMA_CONFIGS[args.shape], PRECISIONS[precision]
    if not folder.exists():
        model = build_llama(shape, device=CPU, seed=1, dtype=dtype)
        write_hub(
            folder,
            config_to_hf(shape),
            {name: parameter.detach() for name, parameter in model.named_parameters()},
        )
    ours = load_llama(folder, device=CPU).model
    assert isinstance(ours, Llama)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prompt = torch.randint(
        shape.vocab_size, (rows, PROMPT), generator=torch.Generator().manual_seed(rows)
    )
    capacity = PROMPT + args.tokens + 1

    def written(decoder: Decoder, tokens: int, step: Any = None) -> Tensor:
        return torch.tensor(
            list(
                sample_tokens(decoder, prompt.tolist(), tokens=tokens, step=step, capacity=capacity)
            )
        ).T

    def generated(tokens: int, **other: Any) -> Tensor:
        seen, how = (
            torch.ones_like(prompt),
            {"do_sample": False, "eos_token_id": None, "pad_token_id": 0},
        )
        with torch.inference_mode():
            return theirs.generate(
                prompt, attention_mask=seen, max_new_tokens=tokens, **how, **other
            )[:, PROMPT:]

    decoder = Decoder(ours, rows=rows)
    subjects: dict[str, Callable[[int], Tensor]] = {
        "ours": lambda tokens: written(decoder, tokens),
        "transformers": generated,
        BASE: lambda tokens: generated(tokens, cache_implementation="static"),
    }
    if args.compile:
        plain = Decoder(ours, layout="plain")
        step = compile_step(plain)
        subjects["ours, compiled"] = lambda tokens: written(plain, tokens, step)
    lines: list[dict[str, Any]] = []
    right: Tensor | None = None
    for name, subject in subjects.items():  # what a first call costs: memory, threads, compiling
        began_s = time.perf_counter()
        found = subject(2)
        right = found if right is None else right
        lines.append(
            {
                "subject": name,
                "precision": precision,
                "rows": rows,
                "first_call_s": time.perf_counter() - began_s,
            }
        )
        if precision == "fp32" and not torch.equal(found, right):
            raise SystemExit(f"{name} writes other tokens than ours")
    for repetition in range(args.repetitions):
        for name, subject in subjects.items():
            short, long = timed(subject, 1), timed(subject, args.tokens + 1)
            steps = [(b - a) / args.tokens for a, b in zip(short, long, strict=True)]
            line = {
                "subject": name,
                "precision": precision,
                "rows": rows,
                "shape": args.shape,
                "repetition": repetition,
            }
            lines.append(
                line | {"tokens": args.tokens, "step_cpu_s": steps[0], "step_wall_s": steps[1]}
            )
            print(
                f"{precision} {rows} rows  {name:<27} {rows / steps[0]:8.1f} tokens/s (wall clock {rows / steps[1]:.1f})",
                flush=True,
            )
    return lines


def timed(subject: Callable[[int], Tensor], tokens: int) -> tuple[float, float]:
    """Seconds: (of the thread, of the wall clock)."""
    began = time.thread_time(), time.perf_counter()
    subject(tokens)
    return time.thread_time() - began[0], time.perf_counter() - began[1]


def rows_of(raw: list[dict[str, Any]]) -> list[str]:
    """The table: the ratio is taken within each repetition, the median counts."""
    lines = [
        "| precision | rows | subject | tokens a second | ours / it, eager | compiled / it | first call |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for precision, rows in dict.fromkeys((line["precision"], line["rows"]) for line in raw):
        here = [line for line in raw if (line["precision"], line["rows"]) == (precision, rows)]
        steps: dict[str, list[float]] = {}
        for line in here:
            if "step_cpu_s" in line:
                steps.setdefault(line["subject"], []).append(line["step_cpu_s"])
        first = {line["subject"]: line["first_call_s"] for line in here if "first_call_s" in line}
        for name, its in steps.items():
            cells = [
                ratio(its, steps[mine]) if mine in steps and mine != name else ""
                for mine in ("ours", "ours, compiled")
            ]
            rate = f"{rows / median(its):.1f}"
            lines.append(
                f"| {precision} | {rows} | {name} | {rate} | {cells[0]} | {cells[1]} | {first[name]:.1f} s |"
            )
    return lines


def ratio(theirs: list[float], ours: list[float]) -> str:
    each = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def layouts() -> list[str]:
    """Microseconds of one product, the best of 40, each time with another copy of the matrix, so that none lies in the cache."""
    lines = []
    for precision, dtype in PRECISIONS.items():
        for size in ((512, 512), (1408, 512), (8192, 512)):
            weights = [
                torch.randn(size).to(dtype)
                for _ in range(max(1, 120_000_000 // (4 * size[0] * size[1])))
            ]
            for rows in (1, 8):
                states, found = torch.randn(rows, size[1]).to(dtype), {}
                for layout in ("plain", "columns", "packed"):
                    matrices = [Matrix(weight, layout) for weight in weights]
                    with torch.inference_mode():
                        found[layout] = (
                            min(
                                timed(lambda n, m=matrices: m[n % len(m)](states), n)[0]  # noqa: B023
                                for n in range(40)
                            )
                            * 1e6
                        )
                chosen = choose_layout("cpu", dtype, rows)
                cells = "  ".join(f"{name} {value:5.0f}" for name, value in found.items())
                lines.append(f"{precision} {size!s:<12} {rows} rows  {cells}  chosen: {chosen}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
