"""The workers of test_fixed_group.py: functions that the workers of a fixed group run, by name.

torchrun ... fixed_workers.py NAME    the same under torchrun
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from processes import mark_ready
from waiting import wait_until

from lockstep.elastic.protocol.decisions import FIXED
from lockstep.errors import DataError, PeersLostError
from lockstep.runtime.exit_report import worker_main
from lockstep.runtime.signals import STOP_EXIT_CODES, StopSignals
from lockstep.runtime.worker_env import read_worker_env


def main(argv: list[str]) -> int:
    worker: Callable[[], int] = globals()[argv[0]]
    return worker() if argv[0].startswith("unreported") else worker_main(worker)


def rank() -> int:
    worker_env = read_worker_env(os.environ)
    return worker_env.slot if worker_env else int(os.environ["RANK"])


def sockets() -> list[str]:
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [link for link in links if "socket:" in link]


def return_0() -> int:
    return 0


def return_75() -> int:
    return 75


def return_130() -> int:
    return 130


def print_environment() -> int:
    env = read_worker_env(os.environ)
    assert env is not None and env.is_child
    numbers = [env.slot, env.slots, env.expected_workers, env.min_workers, env.max_workers]
    Path(f"environment-{rank()}").write_text(
        json.dumps([[*numbers, env.address, "RANK" in os.environ], sockets()])
    )
    print("out", rank())
    print("err", rank(), file=sys.stderr)
    return 0


def rank_1_fails_first_and_exits_last() -> int:
    if rank() == 1:
        atexit.register(lambda: wait_until(Path("gone-0").exists))
        Path("failing").touch()
        raise ValueError("the loss is a fish")
    wait_until(Path("failing").exists)
    atexit.register(lambda: Path("gone-0").touch())
    raise (
        PeersLostError("Connection closed by peer")
        if rank() == 0
        else RuntimeError("[pair.cc:5] Connection closed by peer")
    )


def raise_data_error() -> int:
    raise DataError("line 7 is torn", "a.txt", "fix it")


def rank_1_is_killed() -> int:
    print("output of rank", rank(), flush=True)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def unreported_exit_9_of_rank_1() -> int:
    if rank() == 1:
        print("no such option")
        sys.exit(9)
    time.sleep(60)
    return 0


def unreported_exit_0_of_rank_1() -> int:
    if rank() == 0:
        time.sleep(60)
    return 0


def rank_0_takes_longer() -> int:
    if rank() == 0:
        time.sleep(1)
    return 0


def fail_and_hang() -> int:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise DataError("torn")


def leave_a_child_process() -> int:
    subprocess.Popen(["sleep", "60"])
    return 0


def polite() -> int:
    """Save and stop on the first stop signal."""
    with StopSignals() as signals:
        mark_ready(rank())
        wait_until(lambda: bool(signals.received))
    Path(f"saved-{rank()}").touch()
    return STOP_EXIT_CODES[signals.received]


def deaf() -> int:
    """Ignore stop signals."""
    with StopSignals() as signals:
        mark_ready(rank())
        wait_until(lambda: bool(signals.received))
        Path(f"received-{rank()}").touch()
        time.sleep(60)
    return 0


def without_handlers() -> int:
    mark_ready(rank())
    time.sleep(60)
    return 0


# With gloo.


def join_and_leave() -> int:
    import torch
    import torch.distributed as dist

    from lockstep.elastic.rendezvous import LAUNCH_STORE
    from lockstep.elastic.runtime import ElasticRuntime

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    threads = len(os.listdir("/proc/self/task"))
    with ElasticRuntime.join(threads=1, timeout_s=60, limits=FIXED) as runtime:
        total = torch.ones(4) * (runtime.world.rank + 1)
        dist.all_reduce(total)
        Path(f"world-{runtime.world.rank}").write_text(
            f"{runtime.world.size} {runtime.world.local_rank} {runtime.world.local_size} {runtime.world.host} {total.tolist()}"
        )
    del runtime
    gc.collect()  # the membership of an agent's worker has cycles
    LAUNCH_STORE.store = None  # which the process keeps for its next group
    wait_until(lambda: len(os.listdir("/proc/self/task")) == threads)
    assert not sockets()
    return 0


def rank_1_fails_in_a_collective() -> int:
    """Rank 0 waits in gloo for rank 2, which is stopped. No rank reacts to SIGTERM."""
    import torch
    import torch.distributed as dist

    from lockstep.elastic.runtime import ElasticRuntime

    with ElasticRuntime.join(threads=1, limits=FIXED), StopSignals():
        mark_ready(rank())
        if rank() == 0:
            dist.recv(torch.zeros(1), 2)
        if rank() == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_until(Path("go").exists)
        pending = dist.all_reduce(torch.ones(100_000), async_op=True)
        raise ValueError("boom", pending)


def reduce_forever() -> int:
    import torch
    import torch.distributed as dist

    from lockstep.elastic.runtime import ElasticRuntime

    with ElasticRuntime.join(threads=1, limits=FIXED):
        mark_ready(rank())
        while True:
            dist.all_reduce(torch.ones(10_000))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
