"""DistributedDataParallel over Lockstep's model and micro-batches, without Lockstep: started by torchrun.

    torchrun ... -m bench.diloco.plain_ddp DATA FOLDER EVERY HOOK --KEY VALUE ...

Every EVERY steps rank 0 writes the weights to FOLDER/STEP.safetensors; FOLDER/steps.jsonl has the seconds of each step, without the
writing. HOOK is "none", or "bf16" for torch's communication hook.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from bench.step.batches import tokens_in_step
from lockstep.config.resolve import parse_flags, resolve
from lockstep.corpus.encoded_pairs import open_prepared
from lockstep.corpus.loaders import PairLoader
from lockstep.data.order import splitmix64
from lockstep.models.translator import build_translator
from lockstep.network.subtrees import equal_shares, leaves_of_rank
from lockstep.runtime.numerics import seed_generators
from lockstep.tasks.optim import adamw, learning_rate, set_learning_rate
from lockstep.tasks.translation import make_order


class Training:
    """The model, the optimizer and the micro-batches of a run of Lockstep."""

    def __init__(self, data: str, words: Sequence[str]) -> None:
        self.run, device = resolve(None, parse_flags(list(words))).run, torch.device("cpu")
        corpus = open_prepared(Path(data))
        self.loader = PairLoader(corpus.train, make_order(self.run, corpus), device)
        length, size = self.loader.order.shapes[-1].length, corpus.tokenizer.vocab_size
        self.model = build_translator(
            self.run.model, vocab_size=size, device=device, seed=self.run.seed, length=length
        )
        self.optimizer = adamw(self.model.named_parameters(), self.run.optim)

    def leaves_of(self, rank: int, size: int) -> list[int]:
        return leaves_of_rank(rank, equal_shares(size, self.run.batch.micro_batches))

    def loss(self, model: nn.Module, step: int, k: int) -> Tensor:
        """Return the sum of the losses of a micro-batch."""
        batch = self.loader.micro_batch(step, k)
        seed_generators(splitmix64(self.run.seed, step, k) >> 1, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.run.compute.precision == "bf16"):
            return model(
                batch.source, batch.target, batch.labels, smoothing=self.run.optim.label_smoothing
            )  # type: ignore[no-any-return]

    def update(self, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optim.clip_norm)
        set_learning_rate(self.optimizer, learning_rate(step + 1, self.run.optim))
        self.optimizer.step()
        self.optimizer.zero_grad()


class StepLog:
    """The files of the first process; the others write none."""

    def __init__(self, folder: Path, every: int, *, is_first: bool) -> None:
        self.folder, self.every, self.is_first = folder, every, is_first
        self.path = folder / "steps.jsonl" if is_first else Path(os.devnull)

    def step(self, step: int, seconds: float, model: nn.Module) -> None:
        self.file.write(json.dumps({"step": step, "seconds": seconds}) + "\n")
        self.file.flush()
        if self.is_first and step % self.every == 0:
            weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            save_file(weights, self.folder / f"{step}.safetensors")

    def __enter__(self) -> "StepLog":
        self.file = self.path.open("w")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def send_bf16(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # public at run time
) -> torch.futures.Future[torch.Tensor]:
    return bf16_compress_hook(None, bucket)  # type: ignore[arg-type]  # None: of all processes


def main(data: str, folder: str, every: str, hook: str, *words: str) -> None:
    rank, size, training = dist.get_rank(), dist.get_world_size(), Training(data, words)
    ddp = DistributedDataParallel(training.model, gradient_as_bucket_view=True)
    if hook == "bf16":
        # DDP refuses torch's hook on gloo, by its name, although gloo adds bf16; and annotations that are text.
        ddp.register_comm_hook(None, send_bf16)
    own = training.leaves_of(rank, size)
    with StepLog(Path(folder), int(every), is_first=rank == 0) as log:
        for step in range(training.run.steps):
            start_s, tokens = time.perf_counter(), tokens_in_step(training.loader, step)
            for k in own:
                with nullcontext() if k == own[-1] else ddp.no_sync():
                    (
                        training.loss(ddp, step, k) * (size / tokens)
                    ).backward()  # DDP divides the sum by the number of processes
            training.update(step)
            log.step(step + 1, time.perf_counter() - start_s, training.model)
            dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()
