"""Print what torchrun tells each process of a run: two servers with two devices each.

On each server, with N = 0 on the first and N = 1 on the second:

    torchrun --nnodes 2 --node-rank N --nproc-per-node 2 \\
        --master-addr ADDRESS-OF-THE-FIRST --master-port 29500 examples/learn/ranks.py
"""

from __future__ import annotations

import os

import torch.distributed as dist

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    own = {name: os.environ[name] for name in NAMES}
    rows: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, own)
    if dist.get_rank() == 0:
        print("  ".join(NAMES))
        for row in rows:
            print("  ".join(row[name].rjust(len(name)) for name in NAMES))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
