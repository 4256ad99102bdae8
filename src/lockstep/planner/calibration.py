"""Time the blocks of a run's model on this machine, with the run's own micro-batches."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public at run time

from lockstep.config.schema import RunConfig
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.deferred_init import materialize
from lockstep.parallel.digest import digest_of
from lockstep.parallel.grad_norm import commit_gradient
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.ordered_sum import start_exchange
from lockstep.parallel.parallelize import LocalModel, parallelize
from lockstep.parallel.plans import StagedModel, find_units, plan_of
from lockstep.parallel.tensor_parallel import apply_tensor_parallel
from lockstep.planner.count_model import kind_of, make_module, run_cost, shorten, total
from lockstep.planner.model_cost import ModelCost
from lockstep.planner.step_cost import ASSUMED, Timing, mean_timing
from lockstep.runtime.device import select_device
from lockstep.runtime.process_group import group_timeout, init_default_group
from lockstep.runtime.sockets import interface_with_address, reserve_port
from lockstep.runtime.work import wait_for
from lockstep.tasks.optim import make_optimizers

PROCESSES = get_context("forkserver")  # forked from one that has imported this module
PROCESSES.set_forkserver_preload([__name__])
LOOPBACK = "127.0.0.1"
STEPS = 4  # whose micro-batches are timed
MESSAGES, MESSAGE_BYTES = 33, 4_000_000
REPEATS = 4  # of each; the first is not counted, of the others the median
MEASURED_PARAMETERS = 1_000_000_000  # a larger model is timed with two layers of each kind


class Workbench:
    """What is timed: the model of a run, and the micro-batches of its first steps."""

    def __init__(self, run: RunConfig, folder: Path, runtime: ElasticRuntime) -> None:
        from lockstep.tasks.open import open_task  # needs the packages for text

        self.run = run
        self.device = runtime.world.device
        self.task = open_task(run, folder, runtime)
        numbers = product(range(STEPS), range(run.batch.micro_batches))
        self.batches = [self.task.loader.micro_batch(step, k) for step, k in numbers]

    def cost(self) -> ModelCost:
        """Return the cost over the largest of the micro-batches."""
        names = ["source", "target"] if self.run.task == "translate" else ["tokens"]
        inputs = [[getattr(batch, name) for name in names] for batch in self.batches]
        largest = max(inputs, key=lambda tensors: tensors[-1].numel())
        build = cast(Callable[[], StagedModel], self.task.meta_model)
        return run_cost(self.run, build, [tensor.shape for tensor in largest])

    def rank_model(self, tensor: int = 1) -> nn.Module:
        """Return what one rank of `tensor` computes, with random weights, without activation
        checkpointing."""
        model = self.task.meta_model()
        if sum(p.numel() for p in model.parameters()) > MEASURED_PARAMETERS:
            shorten(model)
        plan = plan_of(model)
        if tensor > 1:
            groups = ProcessGroups(Layout(tensor=tensor))
            apply_tensor_parallel(model, plan.within(model), groups, 0, tensor)
        return materialize(model, self.device, lambda _, shape: torch.randn(shape) * 0.02).train()

    def sharded_model(self, layout: Layout, rank: int) -> LocalModel:
        place = layout.coordinates(rank)
        return parallelize(self.rank_model(), layout, place, None, self.device)

    def time_beside_passes(self, local: nn.Module | LocalModel, model: nn.Module) -> float:
        """Return the seconds that a worker with `local` takes for a micro-batch beside the passes
        of `model`. Collective."""
        size = self.run.batch.micro_batches
        own = list[int]()  # micro-batches of this worker
        with build_replica(local, micro_batches=size, init_sync=False) as replica:

            def once(step: int, batches: Sequence[Any], whole: bool) -> float:
                start_s = time.perf_counter()
                for k in replica.micro_batches(step) if whole else own:
                    loss = self.task.loss(replica if whole else model, batches[k])
                    (replica.backward if whole else Tensor.backward)(loss)
                own[:] = replica.own_leaves
                return time.perf_counter() - start_s

            differences = []
            for number in range(2 * STEPS):
                of_step = self.batches[number % STEPS * size :][:size]
                differences.append(once(number, of_step, True) - once(number, of_step, False))
        return max(0.0, median(differences[2:]) / len(own))


def calibrate(
    run: RunConfig, folder: Path, kind: str, tensor_sizes: Iterable[int]
) -> tuple[ModelCost, Timing]:
    """Return the cost of the run's model over its real micro-batches, and the seconds on this
    device.

    Prepares the data in `folder` if that is missing, as training does.
    kind  of the devices that are planned for. UsageError: this machine has another
    """
    with ElasticRuntime.join(threads=run.compute.num_threads) as runtime:
        device = runtime.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        if kind not in name:
            raise UsageError(
                f"--measure times this machine's {name}, and the plan is for {kind}",
                "--devices, --measure",
                f"remove --measure, or run it on a machine with {kind}",
            )
        bench = Workbench(run, folder, runtime)
        precision = run.compute.precision
        passes: dict[tuple[str, int], tuple[float, float]] = {}
        for tensor in sorted({1, *tensor_sizes}, reverse=True):
            model = bench.rank_model(tensor)
            stopwatch = PassStopwatch(model, plan_of(model).within(model).units)
            measured = stopwatch.time(partial(bench.task.loss, model), precision, bench.batches)
            passes |= {(kind, tensor): seconds for kind, seconds in measured.items()}
        parameters = sum(p.numel() for p in model.parameters())
        accumulate_s = bench.time_beside_passes(model, model)
        timing = ASSUMED[device.type]
        if device.type == "cpu":
            copied_s = bench.time_beside_passes(bench.sharded_model(Layout(), 0), model)
            timing = replace(timing, copy_s=copied_s / parameters)
        return bench.cost(), replace(
            timing,
            passes=passes,
            update_s=time_update(model, run) / parameters,
            accumulate_s=accumulate_s,
            source=f"blocks timed on this {name}",
        )


def own_timing(spelled: str, run: RunConfig) -> Timing:
    """Return the seconds of the units of FILE.py:FUNCTION's module on this machine, on the inputs
    that the function returns."""
    torch.set_num_threads(run.compute.num_threads)
    device, _ = select_device(None)
    module, inputs = make_module(spelled, device)
    stopwatch = PassStopwatch(module, find_units(module))
    measured = stopwatch.time(
        lambda given: total(module(*given)), run.compute.precision, [inputs] * STEPS
    )
    timing = replace(
        ASSUMED[device.type],
        passes={(kind, 1): seconds for kind, seconds in measured.items()},
        update_s=time_update(module, run) / sum(p.numel() for p in module.parameters()),
        source=f"blocks of {spelled} timed on this {device.type}",
    )
    return timing if device.type == "cuda" else replace(timing, message_s=time_messages())


def calibrate_together(
    run: RunConfig, folder: Path, kind: str, tensor_sizes: Sequence[int], processes: int
) -> tuple[ModelCost, Timing]:
    """Return what `calibrate` returns, timed by `processes` processes at once, as the workers of a
    host share its memory and caches. On a GPU one process counts."""
    model, timing = calibrate(run, folder, kind, tensor_sizes)  # alone: it may prepare the data
    if kind != "cpu":
        return model, timing
    if processes > 1:
        PROCESSES.set_forkserver_preload([__name__, "lockstep.tasks.open"])
        with PROCESSES.Pool(processes) as pool:
            found = pool.starmap(calibrate, [(run, folder, kind, tensor_sizes)] * processes)
        timing = mean_timing([timing for _, timing in found])
        timing = replace(timing, source=f"{timing.source}, {processes} workers at once")
    timing = replace(timing, message_s=time_messages())
    if run.batch.micro_batches > 1:
        timing = replace(timing, exchange_s=time_exchanges(run, folder, timing))
    return model, timing


class PassStopwatch:
    """The time of each unit of a model in forward and backward passes.

    units  their names, in forward order
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.device = next(model.parameters()).device
        self.kinds = {name: kind_of(model, name) for name in units}
        self.stamps: dict[tuple[str, str], float] = {}
        for name in units:
            unit = model.get_submodule(name)
            unit.register_forward_pre_hook(partial(self._before, name))
            unit.register_forward_hook(partial(self._after, name))

    def time(
        self, loss: Callable[[Any], Tensor], precision: str, batches: Sequence[Any]
    ) -> dict[str, tuple[float, float]]:
        """Return {kind of unit, "embedding" or "output": mean (forward, backward) seconds over a
        micro-batch}: of each unit and micro-batch the median."""
        samples = defaultdict[tuple[str, int, str], list[tuple[float, float]]](list)
        for repeat, (number, batch) in product(range(REPEATS), enumerate(batches)):
            self.stamps.clear()
            self._stamp("", "starts")
            with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"):
                value = loss(batch)
            self._stamp("", "ends")
            value.backward()
            self._stamp("", "returned")
            if repeat:
                for kind, name, seconds in self._seconds():
                    samples[kind, number, name].append(seconds)
        medians = defaultdict[str, list[tuple[float, ...]]](list)
        for (kind, _, _), pairs in samples.items():
            medians[kind].append(tuple(map(median, zip(*pairs, strict=True))))
        means = {kind: [*map(fmean, zip(*pairs, strict=True))] for kind, pairs in medians.items()}
        return {kind: (forward_s, backward_s) for kind, (forward_s, backward_s) in means.items()}

    def _seconds(self) -> Iterator[tuple[str, str, tuple[float, float]]]:
        """Yield (kind, name, (forward, backward) seconds) of each part of the newest passes."""
        stamps = self.stamps
        begin, end, stop = (stamps["", event] for event in ("starts", "ends", "returned"))
        names = list(self.kinds)
        for name, kind in self.kinds.items():
            # The first unit may read data, which has no gradient: its backward pass is the last.
            returned = stamps.setdefault((name, "returned"), stop)
            forward_s = stamps[name, "ends"] - stamps[name, "starts"]
            yield kind, name, (forward_s, returned - stamps[name, "returns"])
        if not names:
            yield "embedding", "", (0.0, 0.0)
            yield "output", "", (end - begin, stop - end)
            return
        first, last = names[0], names[-1]
        yield "embedding", "", (stamps[first, "starts"] - begin, stop - stamps[first, "returned"])
        yield "output", "", (end - stamps[last, "ends"], stamps[last, "returns"] - end)

    def _stamp(self, name: str, event: str, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.stamps[name, event] = time.perf_counter()

    def _before(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._stamp(name, "starts")
        self._watch(name, "returned", inputs)

    def _after(self, name: str, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._stamp(name, "ends")
        self._watch(name, "returns", output)

    def _watch(self, name: str, event: str, values: Any) -> None:
        """Stamp when the backward pass reaches the first of `values`."""
        first = values[0] if isinstance(values, tuple) and values else values
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(partial(self._stamp, name, event))


def time_messages() -> float:
    """Return the seconds of a core that a worker takes to send a byte to another process of this
    machine and to receive one."""
    with TemporaryDirectory() as folder, PROCESSES.Pool(2) as pool:
        return fmean(pool.starmap(time_exchange, [(rank, f"{folder}/store") for rank in range(2)]))


def time_exchange(rank: int, store: str) -> float:
    """Collective of two processes. Return the processor time of one of them per byte that it sends
    and receives."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface_with_address(LOOPBACK)
    init_default_group(FileStore(store, 2), rank, 2, torch.device("cpu"), 60.0)
    assert dist.group.WORLD is not None
    sent, received = torch.zeros(2, MESSAGE_BYTES // 4)
    for number in range(MESSAGES):
        if number == 1:  # the first one connects
            start_s = time.process_time()
        wait_for(
            start_exchange([(1 - rank, sent)], [(1 - rank, received)], dist.group.WORLD),
            group_timeout(),
        )
    seconds = time.process_time() - start_s
    dist.destroy_process_group()
    return seconds / (MESSAGES - 1) / MESSAGE_BYTES


def time_exchanges(run: RunConfig, folder: Path, timing: Timing) -> float:
    """Return `exchange_s` of two processes that train the model as shards over the loopback
    interface."""
    with reserve_port(LOOPBACK) as port, PROCESSES.Pool(2) as pool:
        arguments = [(run, folder, timing, rank, port.getsockname()[1]) for rank in range(2)]
        return fmean(pool.starmap(time_shards, arguments))


def time_shards(run: RunConfig, folder: Path, timing: Timing, rank: int, port: int) -> float:
    """Collective of two processes. Return the seconds of an exchange of a unit that are neither
    passes nor copies, nor the processor time of its bytes."""
    addresses = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    os.environ.update(
        addresses
        | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    )
    with ElasticRuntime.join(threads=run.compute.num_threads) as runtime:
        bench = Workbench(run, folder, runtime)
        model = bench.rank_model()
        local = bench.sharded_model(Layout(shard=2), rank)
        beside_s = bench.time_beside_passes(local, model)
    parameters = sum(p.numel() for p in model.parameters())
    exchanges = 3 * len(local.fsdp_units) - 1  # the root is gathered once in a pass
    beside_s -= timing.copy_s * parameters
    return max(0.0, beside_s - timing.message_s * 3 * 4 * parameters / 2) / exchanges


def time_update(model: nn.Module, run: RunConfig) -> float:
    """Return the seconds after the sum of the gradients: digest, norm, clipping, optimizers."""
    optimizers, seconds = make_optimizers(model, run.optim, run.memory), []
    for _ in range(5):
        start_s = time.perf_counter()
        digest_of(list(model.parameters()))
        gradient = commit_gradient(list(model.parameters()), None, divisor=2)
        float(gradient.clip_(run.optim.clip_norm or math.inf))
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[1:])
