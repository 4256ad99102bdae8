"""DistributedDataParallel over Lockstep's model and micro-batches, without Lockstep: started by torchrun.

    torchrun ... -m bench.diloco.plain_ddp DATA FOLDER EVERY HOOK --KEY VALUE ...

Every EVERY steps rank 0 writes the weights to FOLDER/STEP.safetensors; FOLDER/steps.jsonl has the seconds of each step, without the
writing. HOOK is "none", or "bf16" for torch's communication hook.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.resolve import parse_flags, resolve
from lockstep.data.order import splitmix64
from lockstep.data.pairs.loader import PairLoader
from lockstep.data.pairs.prepare import open_prepared
from lockstep.models.build import build_translator
from lockstep.network.subtrees import equal_shares, leaves_of_rank
from lockstep.runtime.numerics import seed_generators
from lockstep.tasks.translation import make_order
from lockstep.training.optim import adamw, learning_rate, set_learning_rate


def send_bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return bf16_compress_hook(None, bucket)


def main(data: str, folder: str, every: str, hook: str, *words: str) -> None:
    run, device, rank, size = resolve(None, parse_flags(list(words))).run, torch.device("cpu"), dist.get_rank(), dist.get_world_size()
    corpus = open_prepared(Path(data))
    loader = PairLoader(corpus.train, make_order(run, corpus), device)
    length = loader.order.shapes[-1].length
    model = build_translator(run.model, vocab_size=corpus.tokenizer.vocab_size, device=device, seed=run.seed, length=length)
    optimizer, ddp = adamw(model, run.optim), DistributedDataParallel(model, gradient_as_bucket_view=True)
    if hook == "bf16":
        # DDP refuses torch's hook on gloo, by its name, although gloo adds bf16; and annotations that are text.
        ddp.register_comm_hook(None, send_bf16)
    own = leaves_of_rank(rank, equal_shares(size, run.batch.micro_batches))
    with open(Path(folder) / "steps.jsonl" if rank == 0 else os.devnull, "w") as log:
        for step in range(run.steps):
            start_s, tokens = time.perf_counter(), loader.tokens_in_step(step)
            for k in own:
                batch = loader.micro_batch(step, k)
                seed_generators(splitmix64(run.seed, step, k) >> 1, device)
                with nullcontext() if k == own[-1] else ddp.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=run.compute.precision == "bf16"):
                        loss = ddp(batch.source, batch.target, batch.labels, smoothing=run.optim.label_smoothing)
                    (loss * (size / tokens)).backward()  # DDP divides the sum by the number of processes
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip_norm)
            set_learning_rate(optimizer, learning_rate(step + 1, run.optim))
            optimizer.step()
            optimizer.zero_grad()
            log.write(json.dumps({"step": step + 1, "seconds": time.perf_counter() - start_s}) + "\n")
            log.flush()
            if rank == 0 and (step + 1) % int(every) == 0:
                save_file(
                    {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, Path(folder) / f"{step + 1}.safetensors"
                )
            dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()
