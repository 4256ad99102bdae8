"""Detect rank, world size and rendezvous address from the launcher's environment variables.

    RANK ...     torchrun, or set by hand
    PET_*        torchrun options as Kubeflow sets them, one process per machine
    SLURM_*      a task of srun
    none         one machine: the command may start workers

The first family present counts. A family that is incomplete or inconsistent is an error: a process
that falls back to training alone wastes a cluster and overwrites the checkpoints of the others.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.runtime.variables import CACHE, PROFILE, REPLAY, TRACK
from lockstep.runtime.worker_env import SHARED_TERMINAL, WORKER_ENV

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # x86 AMX tiles, x86 AVX-512, Arm
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# LOCKSTEP_* variables that are not configuration values: for users, for our own workers, for our
# tests.
RESERVED_VARIABLES = (
    "LOCKSTEP_DEVICE",
    "LOCKSTEP_TMP",
    CACHE,
    WORKER_ENV,
    SHARED_TERMINAL,
    "LOCKSTEP_DRILL",
    "LOCKSTEP_CHAOS",
    "LOCKSTEP_HISTORIES",
    "LOCKSTEP_NO_FORKS",
    "LOCKSTEP_STORE_CACHE",
    "LOCKSTEP_STORE_BEAT_S",
    TRACK,
    PROFILE,
    REPLAY,
)
PET = ("PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT")


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of this worker, and the address of the store."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # workers on this machine
    master_addr: str
    master_port: int
    launcher: str
    launcher_has_store: bool = False  # the launcher serves the store (torchrun's agent), not rank 0
    attempt: str = "0"  # prefix of the store keys: separates this start from earlier ones
    warnings: tuple[str, ...] = ()  # known problems of this launcher, one sentence each

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}, "
            f"started by {self.launcher}; rendezvous at {self.master_addr}:{self.master_port}"
        )


NO_LAUNCHER = "one machine (no RANK, PET_NNODES or SLURM_PROCID in the environment)"


def read_rank_info(environ: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this process; None when no launcher started it. UsageError when the
    variables are incomplete, not numbers, or inconsistent."""
    for read in (rank_from_torchrun, rank_from_kubeflow, rank_from_slurm):
        if info := read(environ):
            require_consistent(info, environ)
            return info
    return None


def choose_device(environ: Mapping[str, str], info: RankInfo | None, gpus: int) -> tuple[str, str]:
    """Return (torch device, the reason). gpus: number of CUDA devices visible to this process."""
    wanted = environ.get("LOCKSTEP_DEVICE", "")
    shared = re.fullmatch(r"cuda:(\d{1,4})", wanted)
    if wanted not in ("", "cpu", "cuda") and not shared:
        raise UsageError(
            f"LOCKSTEP_DEVICE={wanted}",
            "environment",
            "use cpu, cuda, or cuda:0 to share a GPU; unset: cuda if available",
        )
    if wanted == "cpu":
        return "cpu", "LOCKSTEP_DEVICE=cpu"
    if not gpus:
        if wanted:
            raise UsageError(
                f"LOCKSTEP_DEVICE={wanted}, but torch sees no GPU",
                "environment",
                "check nvidia-smi and the torch build",
            )
        return "cpu", "torch sees no GPU"
    if shared:
        if int(shared[1]) >= gpus:
            raise UsageError(
                f"LOCKSTEP_DEVICE={wanted}, but torch sees {gpus} GPUs",
                "environment",
                "the number of the first GPU is 0",
            )
        return wanted, f"LOCKSTEP_DEVICE={wanted}, shared by the workers of this machine"
    local_rank = info.local_rank if info else 0
    if info and info.launcher == "srun" and gpus == 1 and local_rank:
        return "cuda:0", "srun gave each task one GPU"
    if local_rank >= gpus:
        launcher = info.launcher if info else "one machine"
        visible = environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UsageError(
            f"local rank {local_rank} has no GPU: this process sees {gpus}",
            f"{launcher}; CUDA_VISIBLE_DEVICES={visible}",
            f"start {gpus} workers on this machine, or set LOCKSTEP_DEVICE=cpu",
        )
    return f"cuda:{local_rank}", f"local rank {local_rank} of {gpus} GPUs"


def default_worker_count(
    environ: Mapping[str, str] = os.environ, driver: Path = Path("/proc/driver/nvidia/gpus")
) -> tuple[int, str]:
    """Return (number of workers, the reason): one per GPU in CUDA_VISIBLE_DEVICES, two on a CPU."""
    if environ.get("LOCKSTEP_DEVICE") == "cpu":
        return 2, "two on the CPU (LOCKSTEP_DEVICE=cpu)"
    gpus = len(list(driver.iterdir())) if driver.is_dir() else 0
    if not gpus and (tool := shutil.which("nvidia-smi", path=environ.get("PATH"))):
        listed = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, check=False, timeout=20
        ).stdout
        gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        devices = [device.strip() for device in visible.split(",")]
        # CUDA ignores what follows an invalid one.
        valid = len(list(takewhile(lambda device: device not in ("", "-1"), devices)))
        count, unit = (valid, "one for each GPU") if valid else (2, "two on the CPU")
        return count, f"{unit} (CUDA_VISIBLE_DEVICES={visible})"
    return (gpus, "one for each GPU") if gpus else (2, "two on the CPU, no GPU found")


def bf16_flag() -> str:
    """Return the flag of this processor's bf16 units, or ""."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return next((flag for flag in BF16_FLAGS if flag in flags), "")


def check_worker_count(workers: int, host: str, cores: int | None = None) -> None:
    """Raise a UsageError for an implausible number of workers: each process loads torch."""
    cores = cores or os.cpu_count() or 1
    most = max(64, 16 * cores)
    if workers > most:
        raise UsageError(
            f"{workers:,} workers on one machine",
            f"{host} has {cores} cores",
            f"start at most {most} on this machine",
        )


# One function per launcher.


def rank_from_torchrun(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of torchrun, which users set too."""
    if not any(name in environ for name in TORCHRUN):
        return None
    require_all(environ, TORCHRUN)
    rank, size, local_rank, local_size = (read_number(environ, name) for name in TORCHRUN)
    given = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ
    launcher = "torchrun" if is_torchrun else "RANK in the environment"
    warnings = []
    if given and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        warnings.append(
            "torchrun restarts workers into the store of the previous attempt; "
            "World separates the attempts, but code that calls init_process_group itself may hang "
            "after a restart: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
    return RankInfo(
        rank,
        size,
        local_rank,
        local_size,
        *read_master(environ, "MASTER_ADDR", "MASTER_PORT"),
        launcher,
        launcher_has_store=given,
        attempt=f"{environ.get('TORCHELASTIC_RUN_ID', '')}-"
        f"{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        warnings=tuple(warnings),
    )


def rank_from_kubeflow(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the torchrun options that Kubeflow sets, for one process per machine."""
    if not any(name in environ for name in PET[:3]):
        return None
    require_all(environ, PET)
    if environ["PET_NPROC_PER_NODE"] != "1" or not environ["PET_NNODES"].isdecimal():
        raise UsageError(
            "these PET_ variables ask torchrun "
            "for several processes per machine or elastic machines",
            set_variables(environ, PET),
            "start with torchrun: torchrun -m lockstep train ...",
        )
    rank, size = read_number(environ, "PET_NODE_RANK"), read_number(environ, "PET_NNODES")
    return RankInfo(
        rank,
        size,
        0,
        1,
        *read_master(environ, "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        launcher="PET_*",
    )


def rank_from_slurm(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of an srun task; None outside Slurm and in a step or script of one task.
    A batch script has SLURM_NTASKS of the whole job although the other tasks were not started; only
    srun sets SLURM_STEP_NUM_TASKS (Slurm's src/common/env.c)."""
    if "SLURM_PROCID" not in environ:
        return None
    step_size = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if step_size == "1":
        if environ.get("SLURM_NTASKS", "1") != "1":
            raise UsageError(
                f"this is a single process, but the Slurm job has {environ['SLURM_NTASKS']} tasks",
                set_variables(
                    environ,
                    ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
                ),
                "start all tasks with srun: srun lockstep train ...; "
                "or request one task, which starts its own workers",
            )
        return None
    names = (
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID",
    )
    require_all(environ, names)
    node = read_number(environ, "SLURM_NODEID")
    counts = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    if node >= len(counts):
        raise UsageError(
            f"SLURM_NODEID={node}, but the Slurm step has {len(counts)} nodes",
            set_variables(environ, names),
            "start the tasks with srun in a fresh shell",
        )
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    master_addr = environ.get("MASTER_ADDR") or first_host(nodes)
    master_port = (
        read_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else slurm_port(environ)
    )
    if not master_addr:
        raise UsageError(
            "SLURM_JOB_NODELIST is not set",
            set_variables(environ, names),
            "start the tasks with srun, or set MASTER_ADDR",
        )
    rank, size, local_rank = (
        read_number(environ, name)
        for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    )
    return RankInfo(rank, size, local_rank, counts[node], master_addr, master_port, launcher="srun")


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: "gpu[03-05,9],x1" -> "gpu03"."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's "2(x3),1" to [2, 2, 2, 1]."""
    matches = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    if not all(matches):
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE={text}", "environment", "expected a list like 2(x3),1"
        )
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]


def slurm_port(environ: Mapping[str, str]) -> int:
    """Return a port derived from job and step, equal in all tasks, below the ephemeral ports."""
    job, step = (
        read_number(environ, "SLURM_JOB_ID"),
        read_number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0,
    )
    return 12_000 + (job * 31 + step) % 20_000


# Helpers.


def read_master(environ: Mapping[str, str], address: str, port: str) -> tuple[str, int]:
    require_all(environ, (address, port))
    return environ[address], read_number(environ, port)


def read_number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal() or len(environ[name]) > 18:
        raise UsageError(
            f"{name}={environ[name][:40]!r} is not a whole number",
            "environment",
            "unset it, or start with torchrun",
        )
    return int(environ[name])


def require_all(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"incomplete launch environment: {', '.join(missing)} {verb} not set",
            set_variables(environ, names),
            "start with torchrun, set the rest "
            "by hand (one worker per machine: LOCAL_RANK=0 LOCAL_WORLD_SIZE=1), or unset all",
        )


def require_consistent(info: RankInfo, environ: Mapping[str, str]) -> None:
    in_range = (
        info.local_rank <= info.rank < info.size and info.local_rank < info.local_size <= info.size
    )
    if not in_range or not 0 < info.master_port < 65536:
        names = tuple(
            name
            for name in environ
            if name in TORCHRUN + PET or name.startswith(("SLURM_PROC", "SLURM_STEP", "MASTER_"))
        )
        raise UsageError(
            f"inconsistent launch environment: {info}",
            set_variables(environ, names),
            "ranks count from 0 to size - 1; start with one launcher, in a fresh shell",
        )


def set_variables(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return those of `names` that are set, as NAME=value."""
    return "environment: " + " ".join(
        f"{name}={environ[name]}" for name in names if name in environ
    )
