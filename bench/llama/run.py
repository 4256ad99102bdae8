"""Race a Llama training step on two processes against other libraries: same model, batches, loss, clipping and AdamW.

    python -m bench.llama.run --keep NAME      keep bench/llama/DATE-NAME/

    replicas   ours (ordered), bare DistributedDataParallel, Accelerate, Lightning Fabric
    shards     ours (layout.shard 2) and bare fully_shard (FSDP2), which reduce after each micro-batch;
               ours (fsdp.reduce = per_step) and Accelerate's FSDP2, which reduce after the last one;
               the same two with memory.weights = bf16 for ours, as in Accelerate's policy: parameters and gradients are sent in bf16,
               the optimizer has float32. On CPUs Accelerate ignores its FSDP plugin silently and takes DistributedDataParallel;
               here its type is set by hand, and the model must be sharded

Each subject is two processes of one thread. Micro-batches before the last are not exchanged wherever the subject can do that. The ratio
is our median step over the other's, within one repetition.
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.results import TOP, keep, machine

SUBJECTS = {
    "replicas": ["ours", "bare", "accelerate", "fabric"],
    "shards": ["ours-shard", "bare-fsdp2"],
    "shards, reduced together": ["ours-together", "accelerate-fsdp2"],
    "shards, reduced together, bf16 weights": ["ours-bf16", "accelerate-fsdp2"],
}
WORKERS, ROWS, LENGTH, WARM = 2, 4, 256, 3


def data(step: int, k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Micro-batch k of a step: (tokens, labels), each (ROWS, LENGTH)."""
    chance = torch.Generator().manual_seed(1000 * step + k)
    tokens = torch.randint(0, vocabulary, (ROWS, LENGTH + 1), generator=chance)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def built(shape_name: str) -> nn.Module:
    from lockstep.models.llama import build_llama
    from lockstep.models.llama_config import LLAMA_CONFIGS

    return build_llama(LLAMA_CONFIGS[shape_name], device=torch.device("cpu"), seed=1)


def adamw_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def narrow() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


class Watch:
    """Seconds of each step on rank 0, from one to the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._at_s = time.perf_counter()

    def step(self) -> None:
        now_s = time.perf_counter()
        self.seconds.append(now_s - self._at_s)
        self._at_s = now_s


# -- subjects -----------------------------------------------------------------------------------------------------------


def ours(
    shape: str, steps: int, each: int, shard: int = 1, together: bool = False, weights: str = "fp32"
) -> Iterator[None]:
    from lockstep.config.schema import MemoryOptions, OptimOptions
    from lockstep.elastic.runtime import ElasticRuntime
    from lockstep.layout import Layout
    from lockstep.models.llama import Llama, init_param
    from lockstep.models.llama_config import LLAMA_CONFIGS
    from lockstep.parallel.grad_norm import commit_gradient
    from lockstep.parallel.parallelize import parallelize
    from lockstep.tasks.optim import adamw
    from lockstep.training.replica_group import ReplicaGroup

    with ElasticRuntime.join() as runtime:
        with torch.device("meta"):
            model = Llama(LLAMA_CONFIGS[shape])
        if weights == "bf16":
            model.bfloat16()
        layout = Layout(WORKERS // shard, shard)
        value = lambda name, size: init_param(name, size, LLAMA_CONFIGS[shape].n_layers, 1)  # noqa: E731
        local_model = parallelize(
            model, layout, layout.coordinates(runtime.world.rank), value, runtime.world.device
        )
        optimizer = (
            adamw_of(local_model.parameters())
            if weights == "fp32"
            else adamw(
                local_model.local_params.items(),
                OptimOptions(learning_rate=1e-3),
                MemoryOptions(weights="bf16"),
            )
        )
        with ReplicaGroup(
            runtime, local_model, micro_batches=each * WORKERS, reduce_once_per_step=together
        ) as replicas:
            for step in range(steps):
                for k in replicas.micro_batches(step):
                    tokens, labels = data(step, k, LLAMA_CONFIGS[shape].vocab_size)
                    with narrow():
                        loss = replicas(tokens, labels)
                    replicas.backward(loss)
                commit_gradient(
                    list(local_model.parameters()),
                    replicas.runner.squared,
                    each * WORKERS * ROWS * LENGTH,
                ).clip_(1.0)
                optimizer.step()
                yield


def bare(shape: str, steps: int, each: int) -> Iterator[None]:
    dist.init_process_group("gloo")
    model = built(shape)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw_of(model.parameters())
    for step in range(steps):
        for turn in range(each):
            tokens, labels = data(step, dist.get_rank() * each + turn, model.config.vocab_size)  # type: ignore[arg-type, union-attr]
            with nullcontext() if turn == each - 1 else ddp.no_sync():
                with narrow():
                    loss = ddp(tokens, labels)
                (loss / (each * ROWS * LENGTH)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def bare_fsdp2(shape: str, steps: int, each: int) -> Iterator[None]:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model: Any = built(shape)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw_of(model.parameters())
    for step in range(steps):
        for turn in range(each):
            tokens, labels = data(step, dist.get_rank() * each + turn, model.config.vocab_size)
            with narrow():
                loss = model(tokens, labels)
            (
                loss / (each * ROWS * LENGTH)
            ).backward()  # it reduces every micro-batch, as we do: whole gradients would not fit
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def accelerate(shape: str, steps: int, each: int, fsdp: bool = False) -> Iterator[None]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FSDPModule

    plugin = None
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"],
            reshard_after_forward=True,
        )
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=each, fsdp_plugin=plugin
    )
    if plugin:
        plugin.set_mixed_precision("bf16")
        accelerator.state.fsdp_plugin = plugin
        AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    model: Any = built(shape)
    vocabulary = model.config.vocab_size
    optimizer = adamw_of(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, FSDPModule) == fsdp, type(model)
    for step in range(steps):
        for turn in range(each):
            tokens, labels = data(step, accelerator.process_index * each + turn, vocabulary)
            with accelerator.accumulate(model):
                loss = model(tokens, labels) / (ROWS * LENGTH)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        yield


def fabric(shape: str, steps: int, each: int) -> Iterator[None]:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment

    del LightningEnvironment
    lightning = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp", precision="bf16-mixed")
    lightning.launch()
    model: Any = built(shape)
    vocabulary = model.config.vocab_size
    model, optimizer = lightning.setup(model, adamw_of(model.parameters()))
    for step in range(steps):
        for turn in range(each):
            tokens, labels = data(step, lightning.global_rank * each + turn, vocabulary)
            with lightning.no_backward_sync(model, enabled=turn < each - 1):
                lightning.backward(model(tokens, labels) / (each * ROWS * LENGTH))
        lightning.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


RUN: dict[str, Callable[[str, int, int], Iterator[None]]] = {
    "ours": ours,
    "ours-shard": lambda shape, steps, each: ours(shape, steps, each, shard=WORKERS),
    "ours-together": lambda shape, steps, each: ours(
        shape, steps, each, shard=WORKERS, together=True
    ),
    "ours-bf16": lambda shape, steps, each: ours(
        shape, steps, each, shard=WORKERS, together=True, weights="bf16"
    ),
    "bare": bare,
    "bare-fsdp2": bare_fsdp2,
    "accelerate": accelerate,
    "accelerate-fsdp2": lambda shape, steps, each: accelerate(shape, steps, each, fsdp=True),
    "fabric": fabric,
}


# -- the race -----------------------------------------------------------------------------------------------------------


def be(subject: str, shape: str, steps: int, each: int, out: Path) -> None:
    """One process of a subject."""
    torch.set_num_threads(1)
    watch = Watch()
    for _ in RUN[subject](shape, steps, each):
        watch.step()
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(watch.seconds))


def run(subject: str, shape: str, steps: int, each: int) -> list[float] | str:
    """Seconds of the steps after the warm-up, or why there are none."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = Path(folder) / "seconds.json"
        words = [sys.executable, "-m", "bench.llama.run", "--be", subject, "--shape", shape]
        words += ["--steps", str(steps), "--each", str(each), "--out", str(out)]
        common = {
            **os.environ,
            "WORLD_SIZE": str(WORKERS),
            "LOCAL_WORLD_SIZE": str(WORKERS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
        common |= {
            "MALLOC_MMAP_THRESHOLD_": "2000000000",
            "MALLOC_TRIM_THRESHOLD_": "4000000000",
        }  # for all of them alike
        pipes: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORKERS)]
        processes = [subprocess.Popen(words, cwd=TOP, env=environ, **pipes) for environ in places]
        errors = [process.communicate(timeout=900)[1] for process in processes]
        if not out.exists():
            lines = [line for line in errors[0].strip().splitlines() if line.strip()]
            return lines[-1] if lines else "no answer"
        seconds: list[float] = json.loads(out.read_text())
        return seconds[WARM:]


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--be", default="")
    asked.add_argument("--out", type=Path)
    asked.add_argument("--shape", default="5M")
    asked.add_argument("--steps", type=int, default=13)
    asked.add_argument("--each", type=int, default=2, help="micro-batches a process")
    asked.add_argument("--repetitions", type=int, default=5)
    asked.add_argument("--keep", default="")
    args = asked.parse_args()
    if args.be:
        be(args.be, args.shape, args.steps, args.each, args.out)
        return
    load = os.getloadavg()
    lines: list[dict[str, Any]] = []
    for repetition in range(args.repetitions):
        for layout, subjects in SUBJECTS.items():
            for subject in subjects:
                found = run(subject, args.shape, args.steps, args.each)
                line = {"layout": layout, "subject": subject, "repetition": repetition}
                lines.append(
                    line
                    | (
                        {"error": found}
                        if isinstance(found, str)
                        else {"seconds": [round(s, 4) for s in found]}
                    )
                )
                print(json.dumps(lines[-1]), flush=True)
    text = told(lines, args, load[0])
    print(text)
    if args.keep:
        keep(args.keep, lines, text, machine("bf16 products, one thread a process", load))


def told(lines: list[dict[str, Any]], args: argparse.Namespace, load: float) -> str:
    """The table."""
    head = (
        f"Llama {args.shape}, {WORKERS} processes on {os.cpu_count()} cores, {args.each} micro-batches of {ROWS} x {LENGTH} tokens a "
        f"process, bf16 products; median of {args.repetitions} repetitions (lowest to highest). "
        f"Load before {load:.1f}, after {os.getloadavg()[0]:.1f}.\n\n"
    )
    rows = ["| layout | against | its step | our step / its step |", "| --- | --- | ---: | ---: |"]
    middle = {
        (one["layout"], one["subject"], one["repetition"]): median(one["seconds"])
        for one in lines
        if "seconds" in one
    }
    for layout, (own, *others) in SUBJECTS.items():
        for other in others:
            both = [
                n
                for n in range(args.repetitions)
                if (layout, own, n) in middle and (layout, other, n) in middle
            ]
            if not both:
                why = next(
                    (one["error"] for one in lines if one["subject"] == other and "error" in one),
                    "",
                )
                rows.append(f"| {layout} | {other} | did not run: {why[:120]} | |")
                continue
            ratios = sorted(middle[layout, own, n] / middle[layout, other, n] for n in both)
            step = median(middle[layout, other, n] for n in both)
            rows.append(
                f"| {layout} | {other} | {step:.3f} s | {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
            )
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
