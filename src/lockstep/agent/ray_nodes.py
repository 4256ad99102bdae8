"""`lockstep launch --ray`: an agent on each node of a Ray cluster.

The driver reserves the same resources on each of N nodes (a placement group, STRICT_SPREAD) and
runs one task in each. The task starts `lockstep launch` as the agent of its node and waits for it.
Agent and workers end with the process of the task, so Ray knows which resources of the node are
free.

If a node is lost, the workers of the others continue at once, without Ray. Ray moves the
reservation to another node as soon as one has room, and repeats the task there: its workers join
the run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.agent.hosts import SENT_VARIABLES, combined_exit_code
from lockstep.elastic.control import request_stop, stop_recipients
from lockstep.elastic.generation_log import Generation, GenerationLog
from lockstep.elastic.run_folder import open_waiting_room, read_folder_id
from lockstep.errors import LockstepError, UsageError, missing_package
from lockstep.runtime.signals import StopSignals
from lockstep.runtime.worker_env import SHARED_TERMINAL

POLL_S = 0.5
CONNECT_TIMEOUT_S = 10.0
# Before a killed agent is started again; Ray takes as long to print the last lines of a task.
DELAY_S = 1.0
CPU_WORKERS = 2  # per node of a cluster without GPUs
Resources = Mapping[str, float]  # of a node: {"CPU": 8.0, "GPU": 1.0, ...}


@dataclass(frozen=True)
class Reservation:
    nodes: int
    workers: int  # of each node
    resources: dict[str, float]  # of each node


# In the driver.


@contextmanager
def connected() -> Iterator[Any]:
    """Connect to the cluster of RAY_ADDRESS, or of this machine; yield the module ray. UsageError.
    At the end Ray kills what is left of the tasks, with their agents and workers."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # a repeated line of a worker is not noise
    try:
        import ray
    except ImportError as error:
        raise missing_package("ray", "ray", "--ray", f"cannot be imported: {error}") from None
    address = os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        if port.isdecimal():  # ray.init tries for minutes
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S
            ).close()
        ray.init(address=address, logging_level="WARNING")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"no Ray cluster answers: {str(error).splitlines()[0]}",
            f"RAY_ADDRESS={address}"
            if address != "auto"
            else "this machine is no node of a cluster, and RAY_ADDRESS is not set",
            "start a node here (ray start --address=HEAD:6379), "
            "or set RAY_ADDRESS; ray status shows a cluster",
        ) from None
    try:
        yield ray
    except ray.exceptions.RayError as error:
        raise LockstepError(
            f"a Ray task failed: {str(error).strip().splitlines()[-1]}",
            "a node of the cluster",
            "every node needs the same Python with lockstep and ray",
        ) from error
    finally:
        time.sleep(DELAY_S)
        ray.shutdown()


def cluster_resources(ray: Any) -> dict[str, Resources]:
    """Return the resources of each node that is alive, by a name for messages."""
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": node["Resources"]
        for node in ray.nodes()
        if node["Alive"]
    }


def choose_reservation(
    cluster: Mapping[str, Resources], nodes: int | None, workers: int | None
) -> Reservation:
    """Return the reservation: for each worker a CPU, and a GPU if the cluster has any.
    nodes: None: every node with room; workers: None: the fewest GPUs of a node that has any, or
    two."""
    gpus = [int(resources["GPU"]) for resources in cluster.values() if resources.get("GPU", 0) >= 1]
    count = workers or min(gpus, default=CPU_WORKERS)
    needed = {"CPU": float(count)} | ({"GPU": float(count)} if gpus else {})
    return Reservation(nodes or max(1, len(nodes_with_room(cluster, needed))), count, needed)


def nodes_with_room(cluster: Mapping[str, Resources], needed: Resources) -> list[str]:
    return [
        name
        for name, resources in cluster.items()
        if all(resources.get(key, 0) >= value for key, value in needed.items())
    ]


def no_room(cluster: Mapping[str, Resources], wanted: Reservation, waited_s: float) -> UsageError:
    """Return the error that fewer nodes than `wanted` had room."""

    def text(resources: Resources) -> str:
        return (
            " and ".join(
                f"{value:g} {key}" for key, value in resources.items() if key in ("CPU", "GPU")
            )
            or "no CPU"
        )

    room = len(nodes_with_room(cluster, wanted.resources))
    what = (
        f"{min(room, wanted.nodes)} of {wanted.nodes} Ray nodes have {text(wanted.resources)}, "
        f"after {waited_s:g} s"
    )
    listed = "; ".join(f"{name}: {text(resources)}" for name, resources in cluster.items())
    hint = f"start more nodes, or give --nodes {max(1, room)}, or fewer --workers (per node)"
    if room >= wanted.nodes:
        what, hint = (
            f"{what}, but other work uses them",
            "wait for it (ray status shows what is free)",
        )
    return UsageError(what, f"--nodes, --workers; the cluster has {listed}", hint)


def run_agents(
    ray: Any,
    wanted: Reservation,
    words: Sequence[str],
    folder: Path,
    *,
    create: Callable[[], str],
    evaluators: int,
    wait_s: float,
) -> int:
    """Run an agent on each of the reserved nodes; return the exit code of the run.

    words       of `lockstep launch`
    folder      run folder, or a copy with the generations of a run in a store
    create      creates the run folder on this host and returns its id
    evaluators  number of nodes, from the first one, with an evaluator
    UsageError before any agent starts.
    """
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([wanted.resources] * wanted.nodes, strategy="STRICT_SPREAD")
    if not group.wait(wait_s):
        raise no_room(cluster_resources(ray), wanted, wait_s)
    folder = folder.resolve()
    folder_id = create()
    before = newest_generation(folder).number
    environ = {
        name: value for name, value in os.environ.items() if name.startswith(SENT_VARIABLES)
    } | {SHARED_TERMINAL: "1"}
    resources = {"num_cpus": wanted.resources["CPU"], "num_gpus": wanted.resources.get("GPU", 0)}
    tasks = {}
    for index in range(wanted.nodes):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        task = ray.remote(run_agent_here).options(
            **resources, scheduling_strategy=strategy, max_retries=-1, name="lockstep"
        )
        own = ["--with-evaluator", *words] if index < evaluators else words
        tasks[task.remote(own, os.getcwd(), environ, folder, folder_id)] = index
    return wait_for_agents(ray, group, tasks, folder, before)


def wait_for_agents(ray: Any, group: Any, tasks: dict[Any, int], folder: Path, before: int) -> int:
    """Wait for the exit of all agents, after the end of the run only for those whose nodes are
    alive. Forward stop signals. tasks: with their index in the group; before: newest earlier
    generation."""
    codes: list[int] = []
    stopping = False
    with StopSignals() as signals:
        while tasks:
            done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=POLL_S)
            codes += [int(ray.get(task)) for task in done]
            tasks = {task: index for task, index in tasks.items() if task not in done}
            with suppress(OSError):  # the run folder is unavailable for a while
                newest = newest_generation(folder)
                if signals.received and not stopping:
                    recipients = stop_recipients(newest, open_waiting_room(folder).members())
                    stopping = bool(
                        request_stop(folder, recipients, signals.received, within_s=1.0, each_s=1.0)
                    )
                # An agent ended without a worker
                refused = newest.number == before and not signals.received
                if codes and (
                    refused
                    or (
                        newest.number > before
                        and newest.end
                        and not on_living_nodes(ray, group, tasks)
                    )
                ):
                    break
    return combined_exit_code(codes)


def on_living_nodes(ray: Any, group: Any, tasks: Mapping[Any, int]) -> list[int]:
    """Return the tasks whose node is alive; the others wait for a node that replaces theirs."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [index for index in tasks.values() if placed.get(index) in alive]


def newest_generation(folder: Path) -> Generation:
    return GenerationLog(folder / "generations").newest()


# In a task, on a node.


def run_agent_here(
    words: Sequence[str], cwd: str, environ: Mapping[str, str], folder: Path, folder_id: str
) -> int:
    """Run the agent of this node until it ends; return its exit code. A killed agent starts again.
    folder_id: of the run folder that the driver sees; "": the run is in a store"""
    import ray

    address, problem = ray.util.get_node_ip_address(), ""
    try:
        seen = read_folder_id(folder) if folder_id else ""
        if seen != folder_id:
            problem = "it is another folder there" if seen else "it does not exist there"
    except OSError as error:
        problem = f"{error.strerror}: {error.filename}"
    if problem:  # here the agent would start another run
        hint = "give --out a folder on a disk that all nodes share, under the same path"
        print(
            UsageError(
                f"the Ray node {address} does not see the run folder {folder}", problem, hint
            ),
            file=sys.stderr,
            flush=True,
        )
        return UsageError.exit_code
    # Several nodes may have one host name.
    name = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:8]}"
    place = ["--parent", str(os.getpid()), "--host", name, "--address", address]
    command = [sys.executable, "-m", "lockstep", "launch", *place, *words]
    while (
        code := subprocess.call(command, cwd=cwd, env={**os.environ, **environ})
    ) == -signal.SIGKILL:
        time.sleep(DELAY_S)
    return 128 - code if code < 0 else code
