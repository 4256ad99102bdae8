"""What saves memory in training, and what it costs: a table for each of recompute, optimizer and loss.

OMP_NUM_THREADS=1 python -m bench.memory.run                              a Llama of 5 M parameters, two rows of 512 tokens, bf16 compute
OMP_NUM_THREADS=1 python -m bench.memory.run --keep NAME    keep bench/memory/DATE-NAME/

One process, one thread; seconds are the thread's CPU time, the best of several. Bytes are those of the tensors that live at
once beside weights and gradients (`support.tensor_memory.TensorMemory`), and for the loss the growth of the process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from support.tensor_memory import TensorMemory

from bench.results import keep, machine
from lockstep.checkpoint.state_dict import get_state_dict
from lockstep.config.schema import MemoryOptions, OptimOptions
from lockstep.models.llama import build_llama
from lockstep.models.llama_config import LLAMA_CONFIGS
from lockstep.parallel.activation_checkpoint import checkpoint_activations
from lockstep.tasks.optim import adamw

Row = dict[str, object]
CPU = torch.device("cpu")
SHAPE, ROWS, LENGTH = LLAMA_CONFIGS["5M"], 2, 512
LOSS = """
import resource, sys, time, torch
from lockstep.models.loss import output_cross_entropy
torch.set_num_threads(1)
states, weight = torch.randn(1024, 256, requires_grad=True), torch.randn(128256, 256, requires_grad=True)
labels, peak = torch.arange(1024), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, began = peak(), time.thread_time()
if sys.argv[1] == "ours":
    loss = output_cross_entropy(states, weight, labels, smoothing=0.0, ignore_index=-100)
else:
    loss = torch.nn.functional.cross_entropy(states @ weight.T, labels, reduction="sum")
loss.backward()
print(peak() - before, time.thread_time() - began)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", metavar="NAME")
    parser.add_argument("--repetitions", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load_before, raw, tables = os.getloadavg(), list[Row](), list[str]()
    for measure in (recomputing, updating, walking, losing):
        rows = list(measure(args.repetitions))
        tables.append(as_table(rows))
        print(f"{tables[-1]}\n", flush=True)
        raw += [{"table": measure.__name__, **row} for row in rows]
    if args.keep:
        keep(args.keep, raw, "\n\n".join(tables), machine("bf16 compute, one thread", load_before))
    return 0


def as_table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    rules = ["---" if isinstance(value, str) else "---:" for value in rows[0].values()]
    return "\n".join(
        f"| {' | '.join(map(str, cells))} |"
        for cells in (rows[0], rules, *(row.values() for row in rows))
    )


def best_s(work: Callable[[], None], repetitions: int) -> float:
    found = []
    for _ in range(repetitions):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)


def recomputing(repetitions: int) -> Iterator[Row]:
    """The blocks of a model, the activations of its forward pass at their peak."""
    tokens = torch.randint(SHAPE.vocab_size, (ROWS, LENGTH))
    for mode in ("none", "selective", "full"):
        model = build_llama(SHAPE, device=CPU, seed=1)
        checkpoint_activations(model.layers, mode)

        def both(model: torch.nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, tokens)
            loss.backward()

        with TensorMemory() as living:
            both()
        peak = living.peak - sum(parameter.nbytes for parameter in model.parameters())
        yield {
            "recompute": mode,
            "activations, MB": round(peak / 1e6),
            "forward and backward, s": round(best_s(both, repetitions), 2),
        }


def updating(repetitions: int) -> Iterator[Row]:
    """Weights and optimizer state of a model, in bytes a parameter, and an update."""
    for weights, state, offload in product(
        ("fp32", "bf16"), ("fp32", "bf16"), ("none", "optimizer")
    ):
        how: dict[str, Any] = {"weights": weights, "optimizer_state": state, "offload": offload}
        model = build_llama(
            SHAPE, device=CPU, seed=1, dtype=torch.bfloat16 if weights == "bf16" else torch.float32
        )
        optimizer = adamw(
            model.named_parameters(),
            OptimOptions(),
            MemoryOptions(**how),
        )
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        took_s = best_s(optimizer.step, repetitions)
        held = sum(
            tensor.nbytes
            for name, tensor in get_state_dict(model, optimizer).items()
            if not name.endswith("step")
        )
        yield {
            **how,
            "bytes a parameter": round(held / SHAPE.num_parameters, 1),
            "update, ms": round(took_s * 1e3),
        }


def walking(repetitions: int) -> Iterator[Row]:
    """torch's AdamW in its three ways to go over the parameters of a larger model."""
    model = build_llama(LLAMA_CONFIGS["25M"], device=CPU, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    what = f"torch's AdamW, {LLAMA_CONFIGS['25M'].num_parameters / 1e6:.0f} M parameters, fp32"
    ways: dict[str, dict[str, Any]] = {
        "foreach": {"foreach": True},
        "one after another": {"foreach": False},
        "fused": {"fused": True},
    }
    for name, words in ways.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **words)
        optimizer.step()
        yield {what: name, "update, ms": round(best_s(optimizer.step, 2 * repetitions) * 1e3)}


def losing(repetitions: int) -> Iterator[Row]:
    """The loss over a large vocabulary: the growth of the process at its peak."""
    what = "loss of 1,024 tokens, 128,256 words, width 256, fp32"
    for name in ("torch", "ours"):
        done = subprocess.run(
            [sys.executable, "-c", LOSS, name], capture_output=True, text=True, check=True
        )
        grown, seconds = map(float, done.stdout.split())
        yield {
            what: name,
            "process grows by, MB": round(grown / 1e6),
            "forward and backward, s": round(seconds, 1),
        }


if __name__ == "__main__":
    raise SystemExit(main())
