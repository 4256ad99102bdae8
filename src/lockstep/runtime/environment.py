"""Who am I? Read from what the starter put into the environment, never guessed.

    LOCKSTEP_*   our own `launch`, on one machine
    RANK ...     torchrun, or a person at two machines; this process is a worker already and starts no others
    PET_*        torchrun's options as Kubeflow sets them, one process a machine
    SLURM_*      a task of srun
    nothing      one machine: whoever asks may start workers

The first family that is there counts. A family that is half there, or that contradicts itself, is an error with its values: a process
that falls back to training alone wastes a cluster and overwrites the checkpoints of the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lockstep.errors import UsageError

OURS = ("LOCKSTEP_RANK", "LOCKSTEP_SIZE", "LOCKSTEP_LOCAL_RANK", "LOCKSTEP_LOCAL_SIZE")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# All that are no values of a run. Behind these: what `lockstep` gives its own workers, and what our tests read.
VARIABLES = (
    *("LOCKSTEP_DEVICE", "LOCKSTEP_TMP"),
    *(*OURS, "LOCKSTEP_MASTER_ADDR", "LOCKSTEP_MASTER_PORT", "LOCKSTEP_LISTEN_FD", "LOCKSTEP_ACCOUNT_FD"),
    *("LOCKSTEP_SEAT", "LOCKSTEP_STATE", "LOCKSTEP_ONE_SCREEN", "LOCKSTEP_DRILL"),
    *("LOCKSTEP_CHAOS", "LOCKSTEP_HISTORIES"),
)
PET = ("PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """One worker's place among all of them.

    master_addr, master_port  where rank 0 holds the store at which they meet
    starter      which family of variables said so
    listen_fd    a socket that listens on that port already, inherited by rank 0 alone
    store_given  the store is held by the starter (torchrun's agent), not by rank 0
    attempt      tells the keys of this start from those of an earlier one in the same store
    warnings     what may go wrong with this starter, one sentence each
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    starter: str
    listen_fd: int | None = None
    store_given: bool = False
    attempt: str = "0"
    warnings: tuple[str, ...] = ()


def find_place(environ: Mapping[str, str]) -> tuple[Place | None, str]:
    """(the place of this process, one line that says what was found); None: one machine, nobody started us as a worker.

    UsageError when the variables are half there, no numbers, or contradict one another.
    """
    for find in (find_ours, find_torchrun, find_pet, find_slurm):
        place = find(environ)
        if place is not None:
            check(place, environ)
            return place, describe(place)
    return None, "one machine (no LOCKSTEP_RANK, RANK, PET_NNODES or SLURM_PROCID in the environment)"


def describe(place: Place) -> str:
    """One line: "rank 1 of 4, local rank 1 of 2, by torchrun; they meet at host:29500"."""
    return (
        f"rank {place.rank} of {place.size}, local rank {place.local_rank} of {place.local_size}, by {place.starter}; "
        f"they meet at {place.master_addr}:{place.master_port}"
    )


def choose_device(environ: Mapping[str, str], place: Place | None, gpus: int) -> tuple[str, str]:
    """(torch's name of this worker's device, the reason); `gpus` is how many CUDA devices this process sees."""
    wanted = environ.get("LOCKSTEP_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise UsageError(f"LOCKSTEP_DEVICE={wanted}", "environment", "cpu or cuda; without it: cuda where there is one")
    if wanted == "cpu":
        return "cpu", "LOCKSTEP_DEVICE=cpu"
    if not gpus:
        if wanted == "cuda":
            raise UsageError("LOCKSTEP_DEVICE=cuda, and torch sees no GPU", "environment", "check nvidia-smi and the build of torch")
        return "cpu", "torch sees no GPU"
    local_rank = place.local_rank if place else 0
    if place and place.starter == "srun" and gpus == 1 and local_rank:
        return "cuda:0", "srun gave each task a GPU of its own"
    if local_rank >= gpus:
        raise UsageError(
            f"local rank {local_rank} has no GPU: this process sees {gpus}",
            f"{place.starter if place else 'one machine'}; CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', 'not set')}",
            f"start {gpus} workers on this machine, or set LOCKSTEP_DEVICE=cpu",
        )
    return f"cuda:{local_rank}", f"local rank {local_rank} of {gpus} GPUs"


# The families.


def find_ours(environ: Mapping[str, str]) -> Place | None:
    """The place that `launch` gave."""
    numbers = read_numbers(environ, OURS)
    if numbers is None:
        return None
    other = {name: environ[name] for name in TORCHRUN if name in environ}
    if any(environ[mine] != other.get(name, environ[mine]) for mine, name in zip(OURS, TORCHRUN, strict=True)):
        what = "two starters disagree about this process"
        hint = "a torchrun inside a worker of ours: start it with env -u for each LOCKSTEP_ variable"
        raise UsageError(what, show(environ, OURS + TORCHRUN), hint)
    listen_fd = environ.get("LOCKSTEP_LISTEN_FD")
    return Place(
        *numbers,
        *read_master(environ, "LOCKSTEP_MASTER_ADDR", "LOCKSTEP_MASTER_PORT"),
        starter="lockstep",
        listen_fd=read_number(environ, "LOCKSTEP_LISTEN_FD") if listen_fd else None,
    )


def find_torchrun(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun gave, or a person who set its variables."""
    numbers = read_numbers(environ, TORCHRUN)
    if numbers is None:
        return None
    given = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    warnings = []
    if given and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        warnings.append(
            "torchrun restarts workers into the store of the dead ones; World keeps the attempts apart in it, but code that calls "
            "init_process_group itself may hang after a restart: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun mends that"
        )
    return Place(
        *numbers,
        *read_master(environ, "MASTER_ADDR", "MASTER_PORT"),
        starter="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK in the environment",
        store_given=given,
        attempt=f"{environ.get('TORCHELASTIC_RUN_ID', '')}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        warnings=tuple(warnings),
    )


def find_pet(environ: Mapping[str, str]) -> Place | None:
    """The place of a machine's only process, from the options that Kubeflow sets for torchrun."""
    if not any(name in environ for name in PET[:3]):
        return None
    require(environ, PET)
    if environ["PET_NPROC_PER_NODE"] != "1" or not environ["PET_NNODES"].isdecimal():
        what = "these are options for torchrun, for more than one fixed process a machine"
        raise UsageError(what, show(environ, PET), "start with torchrun, which reads them: torchrun -m lockstep train ...")
    rank, size = read_number(environ, "PET_NODE_RANK"), read_number(environ, "PET_NNODES")
    return Place(rank, size, 0, 1, *read_master(environ, "PET_MASTER_ADDR", "PET_MASTER_PORT"), starter="PET_*")


def find_slurm(environ: Mapping[str, str]) -> Place | None:
    """The place of a task of srun; None outside of Slurm, and for a step or a batch script of one task.

    A batch script has SLURM_PROCID=0 and the whole job's SLURM_NTASKS, though nobody started the other tasks; only srun sets
    SLURM_STEP_NUM_TASKS (Slurm's src/common/env.c, env_array_for_step).
    """
    if "SLURM_PROCID" not in environ:
        return None
    step_size = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if step_size == "1":
        if environ.get("SLURM_NTASKS", "1") != "1":
            what = f"this is one process, and the Slurm job has {environ['SLURM_NTASKS']} tasks"
            hint = "start the tasks with srun: srun lockstep train ...; or ask Slurm for one task that starts its own workers"
            raise UsageError(what, show(environ, ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")), hint)
        return None
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID")
    require(environ, names)
    node = read_number(environ, "SLURM_NODEID")
    counts = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    if node >= len(counts):
        raise UsageError("the Slurm step has no such node", show(environ, names), "start the tasks with srun, in a fresh shell")
    place = Place(
        read_number(environ, "SLURM_PROCID"),
        read_number(environ, "SLURM_STEP_NUM_TASKS"),
        read_number(environ, "SLURM_LOCALID"),
        counts[node],
        environ.get("MASTER_ADDR", ""),
        read_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else slurm_port(environ),
        starter="srun",
    )
    if place.master_addr:
        return place
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UsageError("no SLURM_JOB_NODELIST", show(environ, names), "start the tasks with srun, or set MASTER_ADDR")
    return replace(place, master_addr=first_host(nodes))


def first_host(nodes: str) -> str:
    """The first name in Slurm's list of nodes: "gpu[03-05,9],x1" -> "gpu03"."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" -> [2, 2, 2, 1]."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if not match:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text}", "environment", "Slurm writes 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slurm_port(environ: Mapping[str, str]) -> int:
    """A port that follows from the job and the step, below those that kernels give out (32768 on): the same in every task."""
    job, step = read_number(environ, "SLURM_JOB_ID"), read_number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0
    return 12_000 + (job * 31 + step) % 20_000


# Reading.


def read_numbers(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[int, int, int, int] | None:
    """(rank, size, local rank, local size) from four variables; None when none of them is set."""
    if not any(name in environ for name in names):
        return None
    require(environ, names)
    rank, size, local_rank, local_size = (read_number(environ, name) for name in names)
    return rank, size, local_rank, local_size


def read_master(environ: Mapping[str, str], address: str, port: str) -> tuple[str, int]:
    """(address, port) at which the workers meet."""
    require(environ, (address, port))
    return environ[address], read_number(environ, port)


def read_number(environ: Mapping[str, str], name: str) -> int:
    """The whole number in a variable."""
    if not environ[name].isdecimal() or len(environ[name]) > 18:
        raise UsageError(f"{name}={environ[name][:40]!r} is not a whole number", "environment", "unset it, or start with torchrun")
    return int(environ[name])


def require(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    """UsageError when some of `names` are set and others are not."""
    missing = [name for name in names if not environ.get(name)]
    if missing:
        what = f"the environment names a worker by halves: no {', '.join(missing)}"
        hint = "torchrun sets all of them; set the rest by hand (one worker a machine: LOCAL_RANK=0 LOCAL_WORLD_SIZE=1), or unset these"
        raise UsageError(what, show(environ, names), hint)


def check(place: Place, environ: Mapping[str, str]) -> None:
    """UsageError when the numbers of a place contradict one another."""
    sound = (
        place.rank < place.size
        and place.local_rank < place.local_size <= place.size
        and place.local_rank <= place.rank
        and 0 < place.master_port < 65536
    )
    if not sound:
        names = tuple(name for name in environ if name in OURS + TORCHRUN + PET or name.startswith(("SLURM_PROC", "SLURM_STEP", "MASTER_")))
        what = f"the environment contradicts itself: {describe(place)}"
        raise UsageError(what, show(environ, names), "ranks count from 0 and stay below their size; a fresh shell and one starter help")


def show(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The variables that are set, as NAME=value."""
    return "environment: " + " ".join(f"{name}={environ[name]}" for name in names if name in environ)
