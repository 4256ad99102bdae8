"""A Llama in bf16, compiled, on one device: tokens a second, model FLOP/s over what the device multiplies at best, memory.

    python -m bench.llama.gpu --keep gpu          on a GPU: the 1B shape, rows of 2,048 tokens
    python -m bench.llama.gpu --shape 1M --rows 2 --length 128 --steps 4          on a CPU, to see that it runs

Weights in bf16 with masters in the optimizer (memory.weights), each block compiled for itself, the loss in pieces; forward, backward,
clipping and update, nothing else beside. The ceiling is that of a matrix product measured in the same call; the goal is 60% of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from statistics import median

import torch

from bench.results import keep, machine
from lockstep.config.schema import MemoryOptions, OptimOptions
from lockstep.layout import Coordinates, Layout
from lockstep.models.llama import Llama, init_param
from lockstep.models.llama_config import LLAMA_CONFIGS
from lockstep.parallel.grad_norm import commit_gradient
from lockstep.parallel.parallelize import parallelize
from lockstep.record.step_timer import flops_per_token, peak_flops, peak_resident_bytes
from lockstep.runtime.numerics import make_deterministic
from lockstep.tasks.optim import make_optimizers
from lockstep.training.profiler import measure_matmul_flops


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--shape", default="1B")
    asked.add_argument("--rows", type=int, default=8)
    asked.add_argument("--length", type=int, default=2048)
    asked.add_argument("--steps", type=int, default=20)
    asked.add_argument("--warm", type=int, default=3)
    asked.add_argument("--no-compile", action="store_true")
    asked.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    asked.add_argument("--json", action="store_true", help="print one line of JSON")
    asked.add_argument("--keep", default="")
    args = asked.parse_args()
    load = os.getloadavg()
    device = torch.device(args.device)
    make_deterministic(device)  # as in every run
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    shape = LLAMA_CONFIGS[args.shape]
    ceiling = measure_matmul_flops(device, torch.bfloat16)
    with torch.device("meta"):
        model = Llama(shape).bfloat16()

    value = lambda name, size: init_param(name, size, shape.n_layers, 1)  # noqa: E731
    held = parallelize(model, Layout(), Coordinates(0, 0, 0, 0), value, device)
    if not args.no_compile:
        for block in model.layers:
            block.compile(dynamic=False)
    memory = MemoryOptions(weights="bf16")
    [optimizer] = make_optimizers(held, OptimOptions(learning_rate=3e-4), memory)
    chance = torch.Generator(device).manual_seed(1)
    seconds = []
    for _ in range(args.warm + args.steps):
        tokens = torch.randint(
            0, shape.vocab_size, (args.rows, args.length + 1), generator=chance, device=device
        )
        began_s = now_s(device)
        held.module(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
        commit_gradient(list(held.parameters()), None, args.rows * args.length).clip_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(now_s(device) - began_s)
    step_s, count = median(seconds[args.warm :]), args.rows * args.length
    flops = flops_per_token(
        shape.num_parameters, shape.n_layers, shape.n_heads * shape.head_dim, args.length
    )
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident_bytes()
    name = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else platform.processor() or "CPU, one thread"
    )
    line = {
        "device": name,
        "shape": args.shape,
        "rows": args.rows,
        "length": args.length,
        "compiled": not args.no_compile,
        "tokens_per_second": count / step_s,
        "mfu": flops * count / step_s / ceiling,
        "ceiling_flops": ceiling,
        "mfu_of_datasheet": flops * count / step_s / peak
        if (peak := peak_flops(name, "bf16"))
        else None,
        "peak_memory_bytes": memory,
        "seconds": seconds,
    }
    text = (
        f"{name}: Llama {args.shape}, {args.rows} x {args.length} tokens, bf16, {'compiled' if line['compiled'] else 'eager'}: "
        f"{count / step_s:,.0f} tokens a second, {line['mfu']:.1%} of the {ceiling / 1e12:.2f} TFLOP/s of a product, "
        f"{memory / 2**30:.2f} GiB\n"
    )
    print(json.dumps(line) if args.json else text.strip())
    if args.keep:
        keep(args.keep, [line], text, machine("bf16", load))


def now_s(device: torch.device) -> float:
    """The time, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
