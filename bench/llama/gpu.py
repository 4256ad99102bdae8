"""A Llama in bf16, compiled, on one device: tokens a second, share of the FLOP/s, memory.

    python -m bench.llama.gpu --keep gpu       on a GPU: the 1B shape, rows of 2,048 tokens
    python -m bench.llama.gpu --loop plain     the same with transformers' model and torch alone
    python -m bench.llama.gpu --shape 1M --rows 2 --length 128 --steps 4      on a CPU, to try it

Forward, backward, clipping and update of random tokens, nothing beside. `lockstep`: the built-in
Llama with weights in bf16 and fp32 weights in the optimizer (memory.weights), each block compiled
for itself, the loss in pieces, deterministic kernels. `plain`: LlamaForCausalLM with fp32 weights
under bf16 autocast, compiled as a whole, fused AdamW, kernels as torch chooses them. The ceiling is
that of a matrix product measured in the same call; the goal is 60% of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from bench.results import keep, machine
from lockstep.config.schema import MemoryOptions, OptimOptions
from lockstep.layout import Coordinates, Layout
from lockstep.models.llama import Llama, init_param
from lockstep.models.llama_config import LLAMA_CONFIGS, LlamaConfig
from lockstep.parallel.grad_norm import commit_gradient
from lockstep.parallel.parallelize import parallelize
from lockstep.record.step_timer import flops_per_token, peak_flops, peak_resident_bytes
from lockstep.runtime.numerics import make_deterministic
from lockstep.tasks.optim import make_optimizers
from lockstep.training.profiler import measure_matmul_flops

LEARNING_RATE = 3e-4
MAX_NORM = 1.0
Step = Callable[[Tensor], object]  # trains on (rows, length + 1) tokens


def lockstep_step(shape: LlamaConfig, device: torch.device, *, compiled: bool) -> Step:
    make_deterministic(device)  # as in every run
    with torch.device("meta"):
        model = Llama(shape).bfloat16()
    value = lambda name, size: init_param(name, size, shape.n_layers, 1)  # noqa: E731
    held = parallelize(model, Layout(), Coordinates(0, 0, 0, 0), value, device)
    if compiled:
        for block in model.layers:
            block.compile(dynamic=False)
    memory = MemoryOptions(weights="bf16")
    [optimizer] = make_optimizers(held, OptimOptions(learning_rate=LEARNING_RATE), memory)

    def step(tokens: Tensor) -> None:
        labels = tokens[:, 1:].contiguous()
        held.module(tokens[:, :-1], labels).backward()
        commit_gradient(list(held.parameters()), None, labels.numel()).clip_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_step(shape: LlamaConfig, device: torch.device, *, compiled: bool) -> Step:
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    config = Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tie_embeddings,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).train()
    forward = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)

    def step(tokens: Tensor) -> None:
        inputs = tokens[:, :-1].contiguous()
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


LOOPS = {"lockstep": lockstep_step, "plain": plain_step}


def main() -> None:
    """The command."""
    args = arguments()
    load = os.getloadavg()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    shape = LLAMA_CONFIGS[args.shape]
    ceiling = measure_matmul_flops(device, torch.bfloat16)
    step = LOOPS[args.loop](shape, device, compiled=not args.no_compile)
    chance = torch.Generator(device).manual_seed(1)
    seconds = []
    for _ in range(args.warm + args.steps):
        size = (args.rows, args.length + 1)
        tokens = torch.randint(0, shape.vocab_size, size, generator=chance, device=device)
        began_s = now_s(device)
        step(tokens)
        seconds.append(now_s(device) - began_s)
    rate = args.rows * args.length / median(seconds[args.warm :])
    width = shape.n_heads * shape.head_dim
    flops = rate * flops_per_token(shape.num_parameters, shape.n_layers, width, args.length)
    name, memory_bytes = platform.processor() or "CPU, one thread", peak_resident_bytes()
    if device.type == "cuda":
        name, memory_bytes = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()
    peak = peak_flops(name, "bf16")
    line = {
        "device": name,
        "loop": args.loop,
        "shape": args.shape,
        "rows": args.rows,
        "length": args.length,
        "compiled": not args.no_compile,
        "tokens_per_second": rate,
        "mfu": flops / ceiling,
        "ceiling_flops": ceiling,
        "mfu_of_datasheet": flops / peak if peak else None,
        "peak_memory_bytes": memory_bytes,
        "seconds": seconds,
    }
    text = (
        f"{name}: Llama {args.shape}, {args.rows} x {args.length} tokens, bf16, {args.loop}, "
        f"{'eager' if args.no_compile else 'compiled'}: {rate:,.0f} tokens a second, "
        f"{flops / ceiling:.1%} of the {ceiling / 1e12:.2f} TFLOP/s of a product, "
        f"{memory_bytes / 2**30:.2f} GiB\n"
    )
    print(json.dumps(line) if args.json else text.strip())
    if args.keep:
        keep(args.keep, [line], text, machine("bf16", load))


def arguments() -> argparse.Namespace:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--loop", choices=LOOPS, default="lockstep")
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
    return asked.parse_args()


def now_s(device: torch.device) -> float:
    """The time, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
