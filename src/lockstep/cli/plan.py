"""`lockstep plan`: bytes per device and seconds per step for every layout, and what to change."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lockstep.cli.script import is_script
from lockstep.cli.start import RunRequest
from lockstep.config.resolve import parse_flags, resolve
from lockstep.config.schema import RunConfig
from lockstep.errors import UsageError
from lockstep.layout import REPLICA_AXES, Layout, LayoutLimits
from lockstep.log import log
from lockstep.planner.devices import GPUS, Cluster, parse_cluster
from lockstep.planner.goodput import Failures, expected_goodput
from lockstep.planner.model_cost import ModelCost
from lockstep.planner.plan import Plan, PlannedLayout, advice, make_plan
from lockstep.planner.step_cost import Timing, Workload, timing_from_flops
from lockstep.runtime.environment import default_worker_count, read_rank_info
from lockstep.units import counted, format_bytes, format_count, format_duration

# Of memory per parameter: an update reads a gradient, and reads and writes a weight (and the state
# of the optimizer); a micro-batch of a replica of several workers copies weights and gradients, and
# adds gradients.
UPDATE_BYTES, COPY_BYTES = 12, 28
SHOWN_REASONS = 3  # of layouts that do not work


def main(args: argparse.Namespace, rest: list[str]) -> int:
    cluster = parse_cluster(args.devices, args.link, args.host_link, args.profile)
    function = args.target if is_script(args.target) else ""
    if function and ":" not in function:
        raise UsageError(
            f"{function} names no function",
            "command line",
            "name a function that returns the model and a micro-batch: "
            f"{function}:make_model (docs/planning.md)",
        )
    run = resolve(
        Path(args.target) if args.target and not function else None, parse_flags(rest), os.environ
    ).run
    run = with_precision(run, cluster)
    model = count_cost(run, function)
    timing = assumed_timing(model, cluster, run)
    if args.measure:
        from lockstep.planner.calibration import calibrate_together, own_timing  # load torch

        if function:
            timing = own_timing(function, run)
        else:
            folder = args.out or Path("runs") / Path(args.target or "default").stem
            limits = LayoutLimits(1, model.heads)
            possible = [n for n in (2, 4, 8) if not limits.problem_with(Layout(tensor=n))]
            sizes = [size for size in possible if cluster.devices % size == 0]
            model, timing = calibrate_together(run, folder, cluster.kind, sizes, cluster.per_host)
    work = Workload(model, run, cluster, timing)
    plan = make_plan(work)
    answer = to_json(plan, work) | {"goodput": goodput_of(args, plan.fitting[0], work)}
    print(json.dumps(answer, indent=1) if args.json else as_text(answer))
    return 0


def count_cost(run: RunConfig, function: str = "") -> ModelCost:
    """Return the cost of the run's model, or of what FILE.py:FUNCTION makes. UsageError."""
    from lockstep.planner.count_model import own_model_cost, planned_cost  # loads torch

    return own_model_cost(function, run) if function else planned_cost(run)


def goodput_of(
    args: argparse.Namespace, best: PlannedLayout, work: Workload
) -> dict[str, Any] | None:
    """Return what --mtbf, --price and --tokens ask for, of the best layout. UsageError."""
    if not (args.mtbf or args.tokens) and args.price is None:
        return None
    mtbf_s = args.mtbf or math.inf
    if args.price is not None and not 0 <= args.price < math.inf:
        raise UsageError(
            f"a price of {args.price:g} dollars per device and hour",
            "--price",
            "give 0 or more, such as 2.5",
        )
    run = work.run
    failures = Failures(mtbf_s, args.price, run.checkpoint.every_steps or run.steps)
    tokens = work.model.tokens * run.batch.micro_batches
    expected = asdict(expected_goodput(best, work.cluster, tokens, failures))
    return expected | ({"total_tokens": args.tokens} if args.tokens else {})


def assumed_timing(model: ModelCost, cluster: Cluster, run: RunConfig) -> Timing:
    flops, source = cluster.flops(run.compute.precision)
    timing = timing_from_flops(model, flops, cluster.device_type, source)
    if not cluster.memory_bytes_per_s:
        return timing
    rate, text = cluster.memory_bytes_per_s, f"{cluster.memory_bytes_per_s / 1e9:g} GB/s of memory"
    state = sum(unit.state.on(1) for unit in model.units) / model.parameters
    return replace(
        timing,
        update_s=(UPDATE_BYTES + 2 * state) / rate,
        copy_s=COPY_BYTES / rate,
        source=f"{source}; {text}",
    )


def with_planned_layout(request: RunRequest, workers: int | None) -> RunRequest:
    """Return the request of a run of this machine with layout.* chosen by its plan, and log why.

    Layouts that keep the bits come first: the tensor axis changes them, and with dropout pipelines.
    """
    run = request.validate()
    if run is None:
        raise UsageError(
            "--layout auto is for a run file",
            "command line",
            "a script chooses its own: Session(shard=..., tensor=..., pipeline=...)",
        )
    if given := [key for key in request.flags if key.startswith("layout.")]:
        raise UsageError(
            f"--layout auto cannot be combined with --{given[0]}",
            "command line",
            "remove one of them",
        )
    if read_rank_info(os.environ) is not None:
        raise UsageError(
            "--layout auto needs lockstep to start the workers, and another launcher has",
            "environment",
            "start lockstep train alone, or set layout.* to what lockstep plan prints",
        )
    count = workers or default_worker_count()[0]
    kind, memory = this_device()
    cluster = parse_cluster(f"1x{count}:{kind}" + (f"-{memory}" if memory else ""), "", "", None)
    run = with_precision(run, cluster)
    # In another process: this one may become an agent, without torch.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        model = pool.submit(count_cost, run).result()
    plan = make_plan(Workload(model, run, cluster, assumed_timing(model, cluster, run)))
    best = min(
        plan.fitting, key=lambda planned: planned.layout.tensor * planned.layout.pipeline > 1
    )
    log.info(
        "--layout auto: %s; %s",
        best.layout,
        f"{format_duration(best.step.seconds)} a step, "
        f"{format_bytes(best.memory.total)} per worker",
    )
    chosen = [(f"--layout.{axis}", str(getattr(best.layout, axis))) for axis in REPLICA_AXES]
    return replace(request, values=[*request.values, *chain.from_iterable(chosen)])


def this_device() -> tuple[str, str]:
    """Return the kind and the memory of a device of this machine, without torch; a CPU's is ""."""
    if not shutil.which("nvidia-smi"):
        return "cpu", ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    name, _, mebibytes = lines[0].partition(",") if lines else ("cpu", "", "")
    known = next((kind for kind in GPUS if re.search(rf"\b{kind}\b", name)), "cpu")
    return known, f"{mebibytes.strip()}MiB" if known != "cpu" else ""


def with_precision(run: RunConfig, cluster: Cluster) -> RunConfig:
    auto = run.compute.precision == "auto"
    return (
        replace(run, compute=replace(run.compute, precision=cluster.precision())) if auto else run
    )


def to_json(plan: Plan, work: Workload) -> dict[str, Any]:
    model = work.model
    run = work.run
    cluster = work.cluster

    def entry(planned: PlannedLayout) -> dict[str, Any]:
        values = asdict(planned)
        values |= values.pop("step")
        return values | {"seconds": planned.step.seconds, "bytes": planned.memory.total}

    found = advice(work, plan.fitting[0])
    if not model.layers:  # a user's own: its loop decides the rest
        found = {
            key.split(".")[1]: value
            for key, value in found.items()
            if key.startswith(("batch.", "parallel."))
        }
    return {
        "model": model.name,
        "parameters": model.parameters,
        "tokens": model.tokens * run.batch.micro_batches,  # of a step; rows of an own model
        "precision": run.compute.precision,
        "devices": (
            f"{counted(cluster.hosts, 'host')} x {cluster.per_host} {cluster.kind}, "
            f"{format_bytes(cluster.memory)} each"
        ),
        "timing": work.timing.source,
        "layouts": [entry(planned) for planned in plan.fitting],
        "refused": [{"layout": asdict(layout), "why": why} for layout, why in plan.refused],
        "hosts": cluster.hosts,
        "options": options_of(plan.fitting[0].layout, cluster),
        "advice": {
            key: {"value": value, "reason": reason} for key, (value, reason) in found.items()
        },
    }


def options_of(layout: Layout, cluster: Cluster) -> str:
    """Return the options of a start with `layout`: of a run file, a recipe or a script."""
    sizes = {axis: getattr(layout, axis) for axis in REPLICA_AXES}
    words = [f"--layout.{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " ".join([f"--workers {cluster.per_host}", *words])


def as_text(answer: dict[str, Any]) -> str:
    tokens, layouts = answer["tokens"], answer["layouts"]
    lines = [
        f"{answer['model']}: {format_count(answer['parameters'])} parameters; "
        f"{format_count(tokens)} tokens a step, {answer['precision']}",
        f"{answer['devices']}; {answer['timing']}",
        *cost_lines(answer),
        f"{'layout':45} {'step':>8} {'compute':>8} "
        f"{'exposed':>8} {'bubble':>8} {'tok/s':>8} {'memory':>10} {'sent':>10}  mostly",
    ]
    for entry in layouts:
        seconds = " ".join(
            f"{format_duration(entry[key]):>8}"
            for key in ("seconds", "compute_s", "exposed_s", "bubble_s")
        )
        sizes = (
            f"{format_count(tokens / entry['seconds']):>8} "
            f"{format_bytes(entry['bytes']):>10} {format_bytes(entry['sent_bytes']):>10}"
        )
        lines.append(f"{Layout(**entry['layout'])!s:45} {seconds} {sizes}  {entry['reason']}")
    if refused := answer["refused"]:
        reasons = dict.fromkeys(entry["why"] for entry in refused)
        listed = "; ".join([*reasons][:SHOWN_REASONS])
        lines.append(f"not possible: {counted(len(refused), 'layout')} (--json): {listed}")
    where = f" on each of {answer['hosts']} hosts" if answer["hosts"] > 1 else ""
    lines += ["", f"use {answer['options']}{where}"]
    for key, found in answer["advice"].items():
        spelled = (
            f"--{key} {found['value']}" if "." in key else f"Session({key}={found['value']!r})"
        )
        lines.append(f"    {spelled}  ({found['reason']})")
    return "\n".join(lines)


def cost_lines(answer: dict[str, Any]) -> Iterator[str]:
    """Yield what --tokens, --price and --mtbf ask for, of the first layout of the table."""
    goodput = answer["goodput"]
    if not goodput:
        return
    best = Layout(**answer["layouts"][0]["layout"])
    dollars = goodput["dollars_per_million_tokens"]
    if total := goodput.get("total_tokens"):
        hours = goodput["device_hours_per_million_tokens"] * total / 1e6
        wall = format_duration(3600 * hours / best.workers)
        price = "" if dollars is None else f", {dollars * total / 1e6:,.2f} dollars"
        yield f"{total:,.0f} tokens with {best}: {hours:,.1f} device hours in {wall}{price}"
    if dollars is not None:
        yield f"{dollars:.4g} dollars per million tokens with {best}"
    if goodput["share"] < 1:  # failures are given
        yield (
            f"goodput {goodput['share']:.2%}: {goodput['lost_s']:.1f} s lost per failure, "
            f"survivors wait {goodput['outage_s']:.1f} s"
        )
