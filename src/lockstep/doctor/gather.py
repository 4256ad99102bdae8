"""Gather the facts of this host. Loads torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from lockstep.agent.hosts import Host
from lockstep.doctor.findings import HostFacts
from lockstep.doctor.probes import write_probe
from lockstep.errors import LockstepError
from lockstep.runtime.memory import process_memory_limit
from lockstep.runtime.sockets import interface_with_address

PORTS, PORTS_PER_WORKER = 8, 4  # that are bound at once
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
QUERY = ("--query-gpu=name,driver_version,memory.used", "--format=csv,noheader")


def gather(host: Host, address: str, run: str) -> HostFacts:
    """Return the facts of this host, without those about its peers. run: folder, or address in a
    store"""
    facts = HostFacts(host.name, host.workers, address=address, folder=run)
    facts = replace(
        facts, variables={name: os.environ[name] for name in INTERFACES if os.environ.get(name)}
    )
    checks = {"interface": interface, "ports": ports, "folder": probe_folder, "versions": versions}
    for check, gather_check in checks.items():
        try:
            facts = replace(facts, **gather_check(facts))
        except Exception as error:  # torch that cannot be imported raises any error
            what = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
            if isinstance(error, LockstepError):
                what = error.what
            facts = with_error(facts, check, what)
    return replace(facts, **limits())


def with_error(facts: HostFacts, check: str, error: str) -> HostFacts:
    return replace(facts, errors={**facts.errors, check: error})


def interface(facts: HostFacts) -> dict[str, Any]:
    return {"interface": interface_with_address(facts.address)}


def ports(facts: HostFacts) -> dict[str, Any]:
    """Bind as many ports as the workers of this host need; return one that is free."""
    family = socket.AF_INET6 if ":" in facts.address else socket.AF_INET
    with ExitStack() as stack:
        for _ in range(PORTS + PORTS_PER_WORKER * facts.workers):
            server = stack.enter_context(socket.create_server((facts.address, 0), family=family))
        return {"master_port": server.getsockname()[1]}


def probe_folder(facts: HostFacts) -> dict[str, Any]:
    """Write a file that the other hosts look for, and measure the time."""
    name = f"{facts.host}-{secrets.token_hex(4)}"
    return {"file": name, **write_probe(facts.folder, name)}


def versions(facts: HostFacts) -> dict[str, Any]:
    import torch  # so that a torch that cannot be imported is a finding

    from lockstep.runtime import numerics, sources
    from lockstep.runtime.device import select_device

    torch.set_num_threads(1)  # compute.num_threads
    driver_gpus = nvidia_smi()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    errors = dict(facts.errors)
    if driver_gpus and not gpus:
        errors["gpu"] = (
            f"the driver has {len(driver_gpus)} GPUs, "
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees none"
        )
    device, _ = select_device(None)
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if gpus else {}
    return {
        "fingerprint": {**numerics.fingerprint(device), **sources.fingerprint()},
        "versions": {
            "python": platform.python_version(),
            "numpy": importlib.metadata.version("numpy"),
            **nccl,
        },
        "gpus": gpus if device.type == "cuda" else [],
        "driver_gpus": driver_gpus,
        "errors": errors if os.environ.get("LOCKSTEP_DEVICE") != "cpu" else facts.errors,
    }


def nvidia_smi() -> list[str]:
    """Return "NAME, driver VERSION, N MiB used" of each GPU; [] without the tool."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    done = subprocess.run([tool, *QUERY], capture_output=True, text=True, check=False, timeout=20)
    rows = (line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2)
    return [f"{name}, driver {driver}, {used} used" for name, driver, used in rows]


def limits() -> dict[str, Any]:
    size, source = process_memory_limit()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = files if files >= 0 else 1 << 20
    return {"memory_bytes": size, "memory_source": source, "open_files": open_files}


def form_group(rank: int, size: int, address: str, master: str, port: int) -> str:
    """Collective. Form a process group of one process per host and all-reduce; return what it
    took."""
    import torch
    import torch.distributed as dist

    from lockstep.elastic.rendezvous import init_static_group, rendezvous
    from lockstep.runtime.device import select_device
    from lockstep.runtime.environment import RankInfo

    info = RankInfo(rank, size, 0, 1, master, port, "lockstep doctor")
    start_s = time.perf_counter()
    os.environ["GLOO_SOCKET_IFNAME"] = interface_with_address(address)  # as lockstep launch does
    device, _ = select_device(None)
    init_static_group(info, rendezvous(info, 30.0), device, 30.0)
    dist.all_reduce(torch.ones(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    backend = "NCCL" if device.type == "cuda" else "gloo"
    return f"{backend} over {size} hosts in {time.perf_counter() - start_s:.2f} s"
