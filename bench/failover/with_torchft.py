"""A torchft training loop after torchft's example, one process per replica, and the lighthouse.

    RANK=0 WORLD_SIZE=3 TORCHFT_LIGHTHOUSE=URL python with_torchft.py RUN.json DATA ANSWER ddp      one of three replicas
    python with_torchft.py lighthouse '{"join_timeout_ms": 10000}'                                  prints its URL

`ddp` reduces gradients through torchft's DistributedDataParallel; `manager` through its Manager's all-reduce after the backward pass.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public at run time
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from bench.failover.loop import Trained
from bench.step.task import read_task


def replica() -> None:
    """Train until killed."""
    task = read_task()
    trained = Trained(task)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, object]:
        return {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}

    def load(saved: dict[str, dict[str, object]]) -> None:
        trained.model.load_state_dict(saved["model"])
        trained.optimizer.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica_{task.rank}",
        timeout=timedelta(seconds=10),
        rank=0,  # within the replica, which is one process
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    by_hand = sys.argv[4] == "manager"
    model = trained.model if by_hand else DistributedDataParallel(manager, trained.model)
    optimizer = Optimizer(manager, trained.optimizer)
    while True:
        optimizer.zero_grad()  # asks for a quorum
        before = manager.current_step()
        trained.backward(model, before)
        if by_hand:
            reduce(
                manager,
                [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
            )
        trained.clip()
        optimizer.step()  # only when all agree to commit
        if manager.current_step() > before:
            trained.note(manager.current_step(), manager.num_participants())


def reduce(manager: Manager, gradients: list[torch.Tensor]) -> None:
    """Collective: the mean over the replicas, in place."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, mean in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))


def lighthouse(limits: dict[str, int]) -> None:
    """Serve until killed."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **limits)
    print(server.address(), flush=True)
    time.sleep(1e6)


if __name__ == "__main__":
    lighthouse(json.loads(sys.argv[2])) if sys.argv[1] == "lighthouse" else replica()
