"""Draw the pictures of the Learn pages and of docs/architecture.md.

    python tools/pictures.py            the diagrams, which need no run
    python tools/pictures.py NAME...    record: run the commands of overlap, rate-limiter or
                                        fine-tuning

A recorded picture shows what its commands did on this machine; they run in a temporary folder.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

import torch

TOP = Path(__file__).parents[1]
FOLDER = TOP / "docs" / "pictures"
STYLE = """text{font:13px system-ui,sans-serif;fill:#333}.small{font-size:11px}\
.m{text-anchor:middle}.e{text-anchor:end}
.value{fill:#06c}.grad{fill:#c50}line,polyline{stroke:#888;fill:none;stroke-width:1.5}\
.curve2{stroke:#c50}.curve1{stroke:#06c}
.axis{stroke:#bbb;stroke-width:1}.box{fill:#eef;stroke:#88a}.compute{fill:#9cf}.send{fill:#fb7}\
.update{fill:#9d9}.wait{fill:#dc8}.held{fill:#9cf;stroke:#88a}
.empty{fill:none;stroke:#bbb}
@media(prefers-color-scheme:dark){text{fill:#eee}.value{fill:#6bf}.grad{fill:#fa5}\
.box{fill:#334;stroke:#668}.axis,.empty{stroke:#555}
.curve1{stroke:#6bf}.curve2{stroke:#fa5}.compute,.held{fill:#26a}.send{fill:#951}\
.update{fill:#373}.wait{fill:#762}}"""


@dataclass
class Picture:
    """An SVG under construction; positions and sizes in pixels."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, hint: str = ""
    ) -> None:
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:g}" '
            f'width="{max(width, 0.5):.1f}" height="{height:g}" class="{kind}">{title}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "") -> None:
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>')

    def curve(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        self.parts.append(
            f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        )

    def svg(self, title: str) -> str:
        head = (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}">'
        )
        return "\n".join(
            [
                head,
                f"<title>{escape(title)}</title>",
                f"<style>{STYLE}</style>",
                *self.parts,
                "</svg>",
                "",
            ]
        )


@dataclass(frozen=True)
class Span:
    start: float
    end: float
    kind: str  # compute, send or update
    label: str = ""


LEGEND = (
    ("compute", "compute"),
    ("send", "communication"),
    ("update", "update"),
    ("wait", "compiler"),
)
QUEUE_LEGEND = (
    ("update", "CPU launches a kernel"),
    ("wait", "CPU waits for a value"),
    ("compute", "GPU computes"),
)


def draw_lanes(
    title: str,
    lanes: Sequence[tuple[str, Sequence[Span]]],
    notes: Sequence[str] = (),
    unit: str = "",
    legend: Sequence[tuple[str, str]] = LEGEND,
) -> str:
    """Return a time line: one lane for each name, time from left to right; with `unit`, an axis."""
    left, width, row = 130, 720, 34
    spans = [span for _, lane in lanes for span in lane]
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    scale = (width - left - 16) / (end - begin)
    bottom = 34 + row * len(lanes)
    picture = Picture(width, bottom + (22 if unit else 4) + 22 + 18 * len(notes))
    picture.text(12, 20, title)
    for number, (name, lane) in enumerate(lanes):
        y = 34 + row * number
        picture.text(left - 8, y + 17, name, "e")
        for span in lane:
            x, size = left + (span.start - begin) * scale, (span.end - span.start) * scale
            picture.box(
                x,
                y,
                size,
                row - 10,
                span.kind,
                f"{span.label} {span.end - span.start:.3g} {unit}".strip(),
            )
            if span.label and len(span.label) * 6.5 < size:
                picture.text(x + size / 2, y + 16, span.label, "small m")
    if unit:
        step = nice_step((end - begin) / 6)
        for tick in range(int((end - begin) / step) + 1):
            x = left + tick * step * scale
            picture.line(x, 30, x, bottom, "axis")
            picture.text(x, bottom + 14, f"{tick * step:g} {unit}", "small m")
        bottom += 18
    for number, (kind, name) in enumerate(
        entry for entry in legend if any(span.kind == entry[0] for span in spans)
    ):
        x = left + (140 if legend is LEGEND else 190) * number
        picture.box(x, bottom + 6, 14, 12, kind)
        picture.text(x + 20, bottom + 16, name, "small")
    for number, note in enumerate(notes):
        picture.text(12, bottom + 38 + 18 * number, note, "small")
    return picture.svg(title)


def nice_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `rough`."""
    power = (
        10.0 ** (len(str(int(rough))) - 1)
        if rough >= 1
        else 10.0 ** -next(n for n in range(1, 12) if rough * 10**n >= 1)
    )
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough)


def draw_curves(
    title: str, axes: tuple[str, str], curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> str:
    """Return a plot of at most two curves, from zero; axes: names of x and y."""
    width, height, left, bottom = 720, 320, 60, 270
    largest_x = max(x for _, points in curves for x, _ in points)
    largest_y = max(y for _, points in curves for _, y in points)
    picture = Picture(width, height)
    picture.text(12, 20, title)
    step_x, step_y = nice_step(largest_x / 6), nice_step(largest_y / 5)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / largest_x * (width - left - 30), bottom - y / largest_y * (bottom - 44)

    for tick in range(int(largest_y / step_y) + 1):
        y = at(0, tick * step_y)[1]
        picture.line(left, y, width - 30, y, "axis")
        picture.text(left - 6, y + 4, f"{tick * step_y:g}", "small e")
    for tick in range(int(largest_x / step_x) + 1):
        picture.text(at(tick * step_x, 0)[0], bottom + 16, f"{tick * step_x:g}", "small m")
    picture.text(width - 30, bottom + 34, axes[0], "small e")
    picture.text(12, 38, axes[1], "small")
    for number, (name, points) in enumerate(curves, 1):
        picture.curve((at(x, y) for x, y in points), f"curve{number}")
        picture.line(
            left + 200 * (number - 1),
            bottom + 30,
            left + 200 * (number - 1) + 20,
            bottom + 30,
            f"curve{number}",
        )
        picture.text(left + 200 * (number - 1) + 26, bottom + 34, name, "small")
    return picture.svg(title)


def house_graph() -> str:
    """Draw the graph of house A with its values (above an edge) and gradients (below)."""
    picture = Picture(720, 250)
    nodes = {
        "w1": (60, 56), "w2": (60, 130), "b": (190, 204), "x 6": (190, 56), "x 2": (190, 130),
        "+": (336, 130), "- 15": (456, 130), "square": (576, 130), "loss": (686, 130),
    }  # fmt: skip
    edges = [  # from, to, value, gradient of the loss by this value
        ("w1", "x 6", "0.773", "-115.836"), ("w2", "x 2", "0.321", "-38.612"),
        ("x 6", "+", "4.638", "-19.306"), ("x 2", "+", "0.642", "-19.306"),
        ("b", "+", "0.067", "-19.306"), ("+", "- 15", "5.347", "-19.306"),
        ("- 15", "square", "-9.653", "-19.306"), ("square", "loss", "93.18", "1"),
    ]  # fmt: skip
    picture.text(12, 20, "house A: (0.773 x 6 + 0.321 x 2 + 0.067 - 15) squared")
    for first, second, value, gradient in edges:
        (x1, y1), (x2, y2) = nodes[first], nodes[second]
        picture.line(x1 + 24, y1, x2 - 26, y2)
        x, y, shift = (x1 + x2) / 2, (y1 + y2) / 2, 44 * (y2 != y1)
        y += 12 * (y2 < y1)
        picture.text(x + shift, y - 6, value, "value small m")
        picture.text(x + shift, y + 15, gradient, "grad small m")
    for name, (x, y) in nodes.items():
        picture.box(x - 26, y - 14, 52, 28, "box")
        picture.text(x, y + 5, name, "m")
    picture.text(330, 215, "value, computed forwards", "value")
    picture.text(330, 235, "gradient of the loss, computed backwards", "grad")
    return picture.svg("The computational graph of house A")


def accumulation_path() -> str:
    """Draw the weights of a run with two weights and two samples, without and with accumulation.

    The price of a sample is x1 w1 + x2 w2. The loss of a step is a sum of squared errors.
    """
    inputs = torch.tensor([[2.0, 0.5], [0.5, 2.0]], dtype=torch.float64)
    prices = torch.tensor([5.0, 5.0], dtype=torch.float64)  # both are right at w1 = w2 = 2

    def train(accumulate: bool) -> list[tuple[float, float]]:
        weights = torch.tensor([0.2, 1.9], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([weights], lr=0.07)
        path = [(weights[0].item(), weights[1].item())]
        for number in range(8):
            sample = number % 2
            ((inputs[sample] @ weights - prices[sample]) ** 2).backward()
            if accumulate and sample == 0:
                continue
            optimizer.step()
            optimizer.zero_grad()
            path.append((weights[0].item(), weights[1].item()))
        return path

    picture = Picture(560, 400)

    def at(w1: float, w2: float) -> tuple[float, float]:
        return 12 + w1 * 200, 340 - (w2 - 1.2) * 220

    picture.text(12, 20, "four passes over two samples, learning rate 0.07")
    slow, fast = math.sqrt(2.25), math.sqrt(6.25)  # of the loss along (1, -1) and (1, 1)
    for level in (0.08, 0.4, 1.2, 2.6, 4.6, 7.2):
        radius = math.sqrt(level)
        turns = [2 * math.pi * k / 120 for k in range(121)]
        along = [(radius * math.cos(turn) / slow, radius * math.sin(turn) / fast) for turn in turns]
        contour = [at(2 + (a + b) / math.sqrt(2), 2 + (b - a) / math.sqrt(2)) for a, b in along]
        for is_inside, points in groupby(contour, lambda point: 34 < point[1] < 350):
            if is_inside:
                picture.curve(points, "axis")
    picture.text(*at(0.03, 1.94), "start", "small")
    picture.text(*at(2.0, 1.99), "lowest loss", "small m")
    for number, (name, accumulate) in enumerate((("without", False), ("with", True)), 1):
        path = [at(*weights) for weights in train(accumulate)]
        picture.curve(path, f"curve{number}")
        for x, y in path:
            picture.line(x, y - 3, x, y + 3, f"curve{number}")
        x = 40 + 250 * (number - 1)
        picture.line(x, 372, x + 20, 372, f"curve{number}")
        steps = f"{name} accumulation: {len(path) - 1} steps"
        picture.text(x + 26, 376, steps, "small")
    return picture.svg("The weights on the loss surface")


def ranks() -> str:
    """Draw two servers of two devices, each with the process that torchrun starts for it."""
    picture = Picture(560, 220)
    picture.text(12, 20, "two servers with two devices each: WORLD_SIZE 4, LOCAL_WORLD_SIZE 2")
    for server in range(2):
        left = 12 + 282 * server
        picture.box(left, 34, 254, 138, "empty")
        picture.text(left + 12, 54, f"server {server}")
        for local in range(2):
            x = left + 12 + 120 * local
            picture.box(x, 66, 110, 92, "box")
            picture.text(x + 55, 86, f"device {local}", "small m")
            picture.text(x + 55, 116, f"RANK {2 * server + local}", "value m")
            picture.text(x + 55, 138, f"LOCAL_RANK {local}", "grad m")
    picture.line(266, 112, 294, 112)
    picture.text(12, 194, "MASTER_ADDR: the address of server 0, on every server", "small")
    picture.text(12, 212, "MASTER_PORT: a free port of server 0, where the processes meet", "small")
    return picture.svg("The ranks of two servers with two devices each")


def data_parallel() -> str:
    step = [
        Span(0, 1, "send", "broadcast"),
        Span(1.1, 2.6, "compute", "forward"),
        Span(2.6, 5, "compute", "backward"),
    ]
    step += [Span(5.1, 6.6, "send", "all-reduce"), Span(6.7, 7.6, "update", "update")]
    note = "The gradients differ before the all-reduce, and are equal after it. So are the weights."
    return draw_lanes(
        "one step on two ranks", [("rank 0, house A", step), ("rank 1, house B", step)], [note]
    )


def no_sync() -> str:
    often: list[Span] = []
    once: list[Span] = []
    for number in range(4):
        often.append(Span(number * 2, number * 2 + 1, "compute", f"batch {number}"))
        often.append(Span(number * 2 + 1.05, number * 2 + 1.95, "send", "all-reduce"))
        once.append(Span(number * 1.05, number * 1.05 + 1, "compute", f"batch {number}"))
    once.append(Span(4.2, 5.1, "send", "all-reduce"))
    return draw_lanes("four micro-batches of one rank", [("DDP", often), ("with no_sync", once)])


def layouts() -> str:
    """Draw which parts of four layers (rows) each of four workers holds, by layout."""
    picture = Picture(720, 210)
    cell, layers = 30, 4
    whole = [(0.0, 1.0)] * layers
    held: dict[str, Callable[[int], list[tuple[float, float] | None]]] = {
        "replicate 4": lambda worker: [*whole],
        "shard 4": lambda worker: [(worker / 4, 1 / 4)] * layers,
        "replicate 2, shard 2": lambda worker: [(worker % 2 / 2, 1 / 2)] * layers,
        "tensor 2, pipeline 2": lambda worker: [
            (worker % 2 / 2, 1 / 2) if layer // 2 == worker // 2 else None
            for layer in range(layers)
        ],
    }
    picture.text(12, 20, "what each of four workers keeps of a model with four layers")
    for number, (name, parts_of) in enumerate(held.items()):
        left = 20 + number * 176
        picture.text(left, 46, name)
        for worker in range(4):
            x = left + worker * (cell + 8)
            for layer, part in enumerate(parts_of(worker)):
                y = 56 + layer * 26
                picture.box(x, y, cell, 20, "empty")
                if part:
                    picture.box(x + part[0] * cell, y, part[1] * cell, 20, "held")
            picture.text(x + cell / 2, 176, str(worker), "small m")
    picture.text(
        12,
        200,
        "Each row is a layer, each column a worker. "
        "Filled: weights, gradients and optimizer state that the worker keeps.",
        "small",
    )
    return picture.svg("Layouts of four workers")


def diloco() -> str:
    lanes = []
    for rank in range(2):
        plain: list[Span] = []
        for step in range(6):
            plain += [
                Span(step * 2, step * 2 + 1, "compute"),
                Span(step * 2 + 1, step * 2 + 2, "send"),
            ]
        lanes.append((f"plain, rank {rank}", plain))
    for rank in range(2):
        apart = [
            Span(step + step // 3 * 1.0, step + 1 + step // 3 * 1.0, "compute", str(step))
            for step in range(6)
        ]
        lanes.append(
            (
                f"DiLoCo, rank {rank}",
                [*apart, Span(3, 4, "send", "outer"), Span(7, 8, "send", "outer")],
            )
        )
    note = (
        "DiLoCo sends one difference of weights every H steps; "
        "plain training one gradient in every step."
    )
    return draw_lanes("six steps on two ranks, H = 3", lanes, [note])


def compiled() -> str:
    """Draw four operations of two steps: one kernel each, or one for all after a compilation."""
    names = ("norm", "matmul", "add", "gelu")
    eager = [
        Span(1.6 * n + 7.2 * step, 1.6 * n + 1.2 + 7.2 * step, "compute", name)
        for step in range(2)
        for n, name in enumerate(names)
    ]
    fused = [
        Span(0, 4.4, "wait", "compile"),
        *(Span(4.6 + 3 * step, 7.2 + 3 * step, "compute", "all four") for step in range(3)),
    ]
    note = (
        "Eager: each operation reads and writes memory, with Python in between. "
        "Compiled: once for all steps of this shape."
    )
    return draw_lanes(
        "a layer, eager and compiled (a sketch)", [("eager", eager), ("compiled", fused)], [note]
    )


BASE = "errors, units, files, log, layout, tensor_slice"
PACKAGES = {  # -> column in pixels, row from the top, packages that it imports from
    "cli": (250, 0, "recipes agent remote"), "recipes": (560, 1, "session planner"),
    "planner": (340, 2, "tasks"), "tasks": (340, 3, "generation config corpus"),
    "generation": (510, 4, "models"), "config": (290, 5, "session"), "corpus": (400, 5, "session"),
    "models": (510, 5, "session"), "session": (640, 6, "history"), "history": (640, 7, "training"),
    "training": (640, 8, "parallel data unsaved"), "agent": (70, 9, "elastic"),
    "remote": (190, 9, "checkpoint elastic"), "parallel": (400, 9, "checkpoint elastic"),
    "unsaved": (540, 9, "runtime"), "elastic": (190, 10, "object_store record"),
    "checkpoint": (340, 10, "runtime"), "object_store": (230, 11, "runtime"),
    "record": (70, 12, ""), "runtime": (430, 12, ""), "data": (660, 12, ""),
}  # fmt: skip


def packages() -> str:
    """Draw the packages, each above its imports, without the arrows that follow from others."""
    picture = Picture(720, 620)
    width, height, row = 96, 26, 44

    def top(level: int) -> int:
        return 10 + row * level

    for x, level, imported in PACKAGES.values():
        for name in imported.split():
            x2, below, _ = PACKAGES[name]
            picture.line(x, top(level) + height, x2, top(below))
        if not imported:
            picture.line(x, top(level) + height, min(max(x, 220), 520), top(13))
    for name, (x, level, _) in PACKAGES.items():
        picture.box(x - width / 2, top(level), width, height, "box")
        picture.text(x, top(level) + 17, name, "m")
    picture.box(200, top(13), 340, height, "box")
    picture.text(370, top(13) + 17, BASE, "m")
    return picture.svg("Packages, each above its imports")


ACTORS = {"data order": 65, "each replica": 225, "other replicas": 525, "vote": 655}
MESSAGES = (  # sender, receiver, text; without a receiver: work of the sender
    ("data order", "each replica", "micro-batches of this rank"),
    ("each replica", "", "each micro-batch: seed generators with (seed, step, k), forward, "
     "backward"),
    ("each replica", "other replicas", "bucket by bucket, during the last backward pass: "
     "halving, addition in tree order, doubling"),
    ("each replica", "", "meanwhile: digest of the weights; is the own slice of the "
     "gradient finite?"),
    ("each replica", "vote", "loss, finite or not, digest of weights, signals, joiners"),
    ("vote", "each replica", "the same verdict on every rank"),
    ("each replica", "", "divide by the tokens of the step, clip, optimizer.step(): commit"),
    ("each replica", "", "metrics line, then checkpoint if due"),
)  # fmt: skip


def step() -> str:
    """Draw the messages of a step, from top to bottom."""
    picture = Picture(720, 380)
    y = 46
    for sender, receiver, message in MESSAGES:
        x, x2 = ACTORS[sender], ACTORS[receiver or sender]
        for part in textwrap.wrap(message, 48):
            y += 15
            picture.text(min(x, x2) + 10, y, part, "small")
        if receiver:
            y += 8
            head = x2 - 6 if x2 > x else x2 + 6
            picture.line(x, y, x2, y)
            picture.curve([(head, y - 4), (x2, y), (head, y + 4)], "")
        y += 13
    for name, x in ACTORS.items():
        picture.box(x - 62, 10, 124, 26, "box")
        picture.text(x, 27, name, "m")
        picture.line(x, 36, x, y, "axis")
    return picture.svg("Messages of a step")


def launch_queue() -> str:
    """Draw when the CPU launches kernels and when the GPU computes them, for four models."""

    def launches(count: int, start: float = 0.0) -> list[Span]:
        return [Span(start + 0.5 * n, start + 0.5 * n + 0.42, "update") for n in range(count)]

    def kernels(count: int, start: float, every: float, length: float) -> list[Span]:
        return [
            Span(start + every * n, start + every * n + length, "compute") for n in range(count)
        ]

    lanes = [
        ("large: CPU", launches(6)),
        ("GPU", kernels(6, 0.5, 1.58, 1.5)),
        ("small: CPU", launches(19)),
        ("GPU", kernels(19, 0.5, 0.5, 0.16)),
        ("a value: CPU", [*launches(3), Span(1.5, 5.3, "wait", "norm > 8?"), *launches(3, 5.4)]),
        ("GPU", [*kernels(3, 0.5, 1.58, 1.5), *kernels(3, 5.9, 1.58, 1.5)]),
        ("compiled: CPU", launches(3)),
        ("GPU", kernels(3, 0.5, 0.66, 0.62)),
    ]
    notes = [
        "Large kernels: the CPU is ahead, and the GPU never waits. "
        "Small ones: the GPU is done before the next launch.",
        "A value that Python reads empties the queue. "
        "Compiled: the 19 small kernels have become 3.",
    ]
    title = "what the CPU launches, and the GPU computes (a sketch)"
    return draw_lanes(title, lanes, notes, legend=QUEUE_LEGEND)


DIAGRAMS = {
    "launch-queue": launch_queue,
    "house-graph": house_graph,
    "accumulation-path": accumulation_path,
    "ranks": ranks,
    "data-parallel": data_parallel,
    "no-sync": no_sync,
    "layouts": layouts,
    "compile": compiled,
    "diloco": diloco,
    "packages": packages,
    "step": step,
}

# Recorded pictures.

COMMUNICATION = re.compile(r"gloo:|c10d::|nccl:")
OPTIMIZER = "Optimizer.step"
BACKWARD = "autograd::engine::evaluate_function"
SHARED = (
    "--llama.size 5M --steps 6 --profile steps=4..5 --checkpoint.every_steps 0 --evaluate.at_end 0"
)


def run(
    command: str, folder: Path, enter: Sequence[str] = (), **environ: str
) -> subprocess.Popen[bytes]:
    words = [*enter, sys.executable, "-m", "lockstep", *shlex.split(command)]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "LOCKSTEP_TMP": str(folder)} | environ,
    )


def run_on_two_hosts(command: str, folder: Path, rate: str) -> None:
    """Run a worker on each of two network namespaces, between which `rate` passes; needs root."""
    sys.path.insert(0, str(TOP / "tests"))
    from support.hosts import Network  # the tests need not be installed for the other pictures

    with Network(2) as network:
        for host in network.hosts:
            network.limit_rate(host, rate)
        environ = {
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": network.hosts[0].address,
            "MASTER_PORT": "29500",
        }
        workers = [
            run(command, folder, host.enter, RANK=str(rank), **environ)
            for rank, host in enumerate(network.hosts)
        ]
        if any(worker.wait(600) for worker in workers):
            raise SystemExit(f"failed: {command}")


def read_step(path: Path) -> dict[str, list[Span]]:
    """Return the spans of the last step in a trace, ms from its start, by lane.
    A step is the time between the ends of two updates."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    timed = [
        (str(event["name"]), event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000)
        for event in events
    ]
    first, last = sorted(end for name, _, end in timed if name.startswith(OPTIMIZER))[-2:]
    lanes: dict[str, list[tuple[float, float]]] = {
        "forward, rest": [],
        "backward": [],
        "communication": [],
        "update": [],
    }
    for name, start, end in timed:
        if not first <= start < end <= last:
            continue
        if COMMUNICATION.match(name):
            lanes["communication"].append((start - first, end - first))
        elif name.startswith((OPTIMIZER, BACKWARD)):
            lanes["update" if name.startswith(OPTIMIZER) else "backward"].append(
                (start - first, end - first)
            )
        elif name.startswith("aten::"):
            lanes["forward, rest"].append((start - first, end - first))
    for lane in ("backward", "update"):
        lanes["forward, rest"] = [
            (a, b)
            for a, b in lanes["forward, rest"]
            if not any(start <= a < end for start, end in lanes[lane])
        ]
    kinds = {
        "forward, rest": "compute",
        "backward": "compute",
        "communication": "send",
        "update": "update",
    }
    return {
        name: [Span(a, b, kinds[name]) for a, b in merged(spans)] for name, spans in lanes.items()
    }


def merged(spans: Iterable[tuple[float, float]], gap: float = 0.4) -> list[tuple[float, float]]:
    """Return the union of spans; gaps of less than `gap` are closed."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1] + gap:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def trace_of(words: str, folder: Path, rate: str) -> dict[str, list[Span]]:
    run_on_two_hosts(
        f"train {TOP}/recipes/llama-pretrain.toml {SHARED} {words} --out {folder}/run", folder, rate
    )
    lanes = read_step(folder / "run" / "profile" / "rank-0.trace.json.gz")
    shutil.rmtree(folder / "run")
    return lanes


def overlap(folder: Path) -> str:
    lanes = trace_of("--parallel.bucket_bytes '2 MB' --batch.micro_batches 2", folder, "1gbit")
    return draw_lanes(
        "one step of rank 0, buckets of 2 MB over 1 Gbit/s", list(lanes.items()), unit="ms"
    )


def rate_limiter(folder: Path) -> str:
    lanes: list[tuple[str, list[Span]]] = []
    for units in (0, 1):
        step = trace_of(f"--layout.shard 2 --fsdp.prefetch_units {units}", folder, "1gbit")
        lanes += [
            (f"{units}: compute", [*step["forward, rest"], *step["backward"], *step["update"]]),
            (f"{units}: network", step["communication"]),
        ]
    return draw_lanes(
        "one step of rank 0 in two shards over 1 Gbit/s, by fsdp.prefetch_units", lanes, unit="ms"
    )


def metrics(folder: Path, command: str) -> list[dict[str, float]]:
    if run(f"{command} --out {folder}/run", folder).wait(900):
        raise SystemExit(f"failed: {command}")
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    shutil.rmtree(folder / "run")
    return lines


def fine_tuning(folder: Path) -> str:
    lines = metrics(folder, f"train {TOP}/recipes/llama-sft.toml --workers 2 --evaluate.at_end 0")
    return draw_curves(
        "recipes/llama-sft.toml",
        ("step", "loss per token of the answers"),
        [("loss", [(line["step"], line["loss"]) for line in lines])],
    )


RECORDED = {"overlap": overlap, "rate-limiter": rate_limiter, "fine-tuning": fine_tuning}


def main(names: list[str]) -> int:
    if unknown := set(names) - RECORDED.keys():
        raise SystemExit(f"unknown picture: {', '.join(unknown)}; there are {', '.join(RECORDED)}")
    for name, draw in ({} if names else DIAGRAMS).items():
        (FOLDER / f"{name}.svg").write_text(draw())
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{name}.svg").write_text(RECORDED[name](Path(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
