"""torchft's DiLoCo over Lockstep's model and micro-batches, with one process on each host.

    python -m bench.diloco.with_torchft DATA FOLDER EVERY H RANK ADDRESS,ADDRESS --KEY VALUE ...

The process of rank 0 also serves the lighthouse. Files as of plain_ddp.py. The inner AdamW keeps its state, as in torchft's example.
"""

import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public at run time
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from bench.diloco.plain_ddp import StepLog, Training
from bench.step.batches import tokens_in_step

PORT = 29512
CONNECT_S = 60.0


def main(
    data: str, folder: str, every: str, sync_every: str, rank: str, addresses: str, *words: str
) -> None:
    hosts, training = addresses.split(","), Training(data, words)
    socket.gethostname = lambda: hosts[
        int(rank)
    ]  # torchft announces its stores by this name, which the namespaces of a machine share
    lighthouse = (
        LighthouseServer(bind=f"{hosts[0]}:{PORT}", min_replicas=len(hosts))
        if rank == "0"
        else None
    )
    store = TCPStore(hosts[int(rank)], 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=training.model.load_state_dict,
        state_dict=training.model.state_dict,
        min_replica_size=len(hosts),
        use_async_quorum=False,
        replica_id=f"replica_{rank}",
        timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=CONNECT_S),
        lighthouse_addr=f"http://{hosts[0]}:{PORT}",
        rank=0,  # within the replica, which is one process
        world_size=1,
        store_addr=hosts[int(rank)],
        store_port=store.port,
        hostname=hosts[int(rank)],
    )
    model, options = training.model, training.run.diloco
    outer = torch.optim.SGD(
        model.parameters(),
        lr=options.outer_learning_rate,
        momentum=options.outer_momentum,
        nesterov=options.outer_momentum > 0,
    )
    diloco = DiLoCo(
        manager, [model], training.optimizer, outer, sync_every=int(sync_every), pin_memory=False
    )
    with diloco, StepLog(Path(folder), int(every), is_first=rank == "0") as log:
        for step in range(training.run.steps):
            start_s = time.perf_counter()
            own = training.leaves_of(int(rank), len(hosts))
            tokens = tokens_in_step(training.loader, step, own)
            for k in own:
                (training.loss(model, step, k) / tokens).backward()
            training.update(step)
            log.step(step + 1, time.perf_counter() - start_s, model)
    manager.shutdown()
    if lighthouse:
        time.sleep(1)  # the other process leaves first
        lighthouse.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
