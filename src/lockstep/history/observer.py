"""The replayed step, seen from inside: each micro-batch alone, each module, each tensor.

Replica.rehearsal runs a micro-batch without an effect on the step. So the step that is recorded is
the one that a run without an observer computes.
"""

from __future__ import annotations

import hashlib
import math
import pdb
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.errors import UsageError
from lockstep.history.request import OBSERVED, Replay
from lockstep.history.sample_losses import SampleLosses
from lockstep.history.why import rank
from lockstep.record.metrics import append_json
from lockstep.runtime.tensor_bytes import bytes_of, tensors_of
from lockstep.training.loader import KeyedBatches, Loader, get_samples, makes_micro_batches
from lockstep.training.started_run import StartedRun

WORST = 3  # recorded samples of a micro-batch
# Of the frames between the loop and the observer.
CORE = tuple(str(Path(__file__).parents[1] / name) for name in ("history", "training", "session"))


class Recorder:
    """The tensors of a forward and a backward pass, in the order in which they are computed.

    seen  name and hash of each: "layers.0 output"; of the second call of a module "layers.0#2"
    kept  the tensors, with their number in the name: "00012 layers.0 output"; {} unless `keeps`
    """

    def __init__(self, module: nn.Module, *, keeps: bool) -> None:
        self.module = module
        self.keeps = keeps
        self.seen: list[tuple[str, str]] = []
        self.kept: dict[str, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []

    def take(self, name: str, value: Any) -> None:
        """Record the tensors in a value; several have numbers: "layers.0 output 1"."""
        tensors = list(tensors_of(value))
        for i, tensor in enumerate(tensors):
            numbered = f"{name} {i}" if len(tensors) > 1 else name
            if self.keeps:
                kept = tensor.detach().cpu().contiguous().clone()
                self.kept[f"{len(self.seen):05d} {numbered}"] = kept
            self.seen.append((numbered, hash_tensor(tensor)))

    def __enter__(self) -> Recorder:
        for name, module in self.module.named_modules():
            before = partial(self._before, name)
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(partial(self._after, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, name: str, module: nn.Module, args: Any, named: Any) -> None:
        self._calls[name] += 1
        self.take(f"{self._call(name)} input", [args, named])

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        call = self._call(name)
        self.take(f"{call} output", output)
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.take, f"{call} gradient"))

    def _call(self, name: str) -> str:
        number = self._calls[name]
        return (name or "the model") + (f"#{number}" if number > 1 else "")


def hash_tensor(tensor: Tensor) -> str:
    """Return 64 bits over the shape, the type and the values of a tensor, as text."""
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


class Observer:
    """What a replay adds to a run: it looks at one step, and ends after it."""

    def __init__(self, replay: Replay, run: StartedRun) -> None:
        self.replay = replay
        self.run = run
        self.replica = run.replicas.replica
        self.path = Path(replay.folder) / OBSERVED
        if replay.observes and (run.leaves.divisor or self.replica.workers_per_replica > 1):
            raise UsageError(
                "the micro-batches of learners, and of slices of a model, cannot be looked into",
                f"layout {self.replica.groups.layout}",
                "lockstep replay RUN --step N compares losses and digests there",
            )

    def _is_observed(self, step: int) -> bool:
        return step + self.run.replicas.commit_steps >= self.replay.step

    def passes(self, step: int) -> Iterator[int]:
        """Yield each micro-batch of the replayed step alone, and record it."""
        if not (self.replay.observes and self._is_observed(step)):
            return
        self._write_weights("before")
        for k in range(self.replica.leaves):
            yield from self._pass(step, k)

    def _pass(self, step: int, k: int) -> Iterator[int]:
        """Yield micro-batch `k` alone, and record its passes."""
        loader = self._loader(step)
        batch = loader.batch(step, k) if loader else []
        losses = SampleLosses(rows_of(loader, batch, step, k))
        norm_squared = 0.0
        keeps = bool(self.replay.dump) and k == self.replay.dumped
        with Recorder(self.replica.module, keeps=keeps) as recorder, losses:
            recorder.take("(batch)", tensors_in(batch))
            for again in self.replica.rehearsal(step, k):
                yield again
                for name, p in self._parameters():
                    if p.grad is not None:
                        recorder.take(f"{name} weight gradient", p.grad)
                        norm_squared += float(p.grad.double().square().sum())
        by_row = losses.by_row()
        line = {
            "micro_batch": k,
            "loss": self.replica.hashed.loss,
            "norm": math.sqrt(norm_squared),
            "kind": self.run.declared.sample_kind,
            "samples": self.run.declared.samples(step, k),
            "median": median(map(rank, by_row)) if by_row else None,
            "worst": [
                {"loss": by_row[row], **sample_of(loader, batch, step, k, row)}
                for row in highest(by_row)
                if loader
            ],
            "tensors": recorder.seen,
        }
        append_json(self.path, line)
        self._dump(f"micro-batch-{k}", recorder)

    def _loader(self, step: int) -> Loader | None:
        """Return the loader that the loop iterates over in this step."""
        loaders = self.run.declared.loaders
        return next((loader for loader, _ in loaders if loader.newest_step == step), None)

    def _write_weights(self, when: str) -> None:
        recorder = Recorder(self.replica.module, keeps=bool(self.replay.dump))
        for name, p in self._parameters():
            recorder.take(f"{name} {when}", p)
        append_json(self.path, {"micro_batch": None, "tensors": recorder.seen})
        self._dump(when, recorder)

    def _dump(self, name: str, recorder: Recorder) -> None:
        if recorder.keeps:
            from safetensors.torch import save_file

            save_file(recorder.kept, Path(self.replay.dump) / f"{name}.safetensors")

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self.replica.source.names, self.replica.parameters, strict=True)

    def enter(self, step: int, k: int) -> None:
        """Start pdb in the loop that is about to get micro-batch `k`."""
        if k == self.replay.stops_at and self._is_observed(step) and self.run.runtime.world.leader:
            stop_in(frame_of_loop())

    def end_step(self, step: int) -> None:
        """End the process after the replayed step."""
        if step >= self.replay.step:
            if self.replay.observes:
                self._write_weights("updated")
            raise SystemExit


def tensors_in(batch: Any) -> list[Tensor]:
    return list(tensors_of(vars(batch) if is_dataclass(batch) else batch))


def rows_of(loader: Loader | None, batch: Any, step: int, k: int) -> int:
    """Return the number of rows of the first tensor in a micro-batch; 0: they are no samples."""
    rows = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)
    if loader is None or makes_micro_batches(loader.batches.dataset):
        return rows
    ids = loader.order.ids(step, k).tolist()  # nodes of graphs are no samples
    return rows if rows == len(ids) and keeps_order(loader.batches, ids) else 0


def keeps_order(batches: KeyedBatches, ids: Sequence[int]) -> bool:
    """Return whether row i of a micro-batch is sample i. A collate function may sort the samples:
    then it does not turn the rows around with them."""
    samples = get_samples(batches.dataset, ids)
    rows = tensors_in(batches.collate_fn(deepcopy(samples)))
    turned = tensors_in(batches.collate_fn(samples[::-1]))
    return all(
        hash_tensor(own.flip(0)) == hash_tensor(other)
        for own, other in zip(rows, turned, strict=True)
        if own.dim() and len(own) == len(ids)
    )


def highest(losses: Sequence[float]) -> list[int]:
    """Return the numbers of the rows with the highest losses."""
    return sorted(range(len(losses)), key=lambda row: rank(losses[row]))[-WORST:]


def sample_of(loader: Loader, batch: Any, step: int, k: int, row: int) -> dict[str, Any]:
    """Return numbers and content of the samples in a row of micro-batch `k`: of a data set that
    makes its micro-batches, the row itself."""
    dataset = loader.batches.dataset
    if makes_micro_batches(dataset):
        parts = [tensor[row] for tensor in tensors_in(batch) if tensor.dim() and len(tensor) > row]
        numbers: Any = [f"of row {row}"]
        if hasattr(dataset, "samples_in_row"):
            numbers = dataset.samples_in_row(step, k, row)
        elif hasattr(dataset, "samples"):
            numbers = dataset.samples(step, k)[row : row + 1]
    else:
        numbers = [int(loader.order.ids(step, k)[row])]
        parts = dataset[numbers[0]]
    if not isinstance(parts, tuple | list):
        parts = [parts]
    return {"samples": numbers, "content": list(map(describe, parts))}


def describe(part: Any) -> Any:
    """Return a text or a number as it is, token ids as a list, of another tensor or array type and
    shape."""
    if isinstance(part, Tensor) and not part.is_floating_point() and part.dim() < 2:
        return part.tolist()
    if hasattr(part, "shape"):
        return f"{part.dtype} {tuple(part.shape)}"
    return str(part)


def stop_in(frame: FrameType) -> None:
    """Start pdb at the next line of this frame, not in the generators that return to it."""
    debugger = pdb.Pdb()
    debugger.reset()
    debugger.botframe = frame
    frame.f_trace = debugger.trace_dispatch
    debugger.set_next(frame)
    sys.settrace(debugger.trace_dispatch)


def frame_of_loop() -> FrameType:
    """Return the frame of the loop of a user or a recipe, below the generators that it takes."""
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code.co_filename.startswith(CORE):
        frame = frame.f_back
    assert frame
    return frame
