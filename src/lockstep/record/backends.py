"""Where people look at a run: TensorBoard and Weights & Biases. Optional packages, imported only when asked for.

A sink has no memory of its own that could be lost: when it opens it says what it holds (`held`), and the tracker sends
the rest from the run's files. How each knows:

TensorBoard writes in the background, so a killed process leaves a file that ends earlier than the run. The tracker
notes how far it was at each flush; the next start rewinds to that note (`purge_step`: readers forget all points from
that step on) and sends again what follows it.

Weights & Biases cannot rewind, and its offline mode knows nothing of resuming (0.31: a new folder for each start). It
writes in a process of its own, whose last seconds are lost when the trainer is killed. So every row carries how far it
is, under the hidden keys `lockstep/*`, and the last row that arrived is the answer: online in the server's summary,
offline at the end of the newest file. `wandb sync` then uploads the folders of all starts as one run.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from lockstep.errors import ConfigError
from lockstep.files import regular

log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Held:
    """How far a sink is: its last step, the bytes of evaluations.jsonl it was sent, the rows it got in all."""

    step: int = 0
    evaluations_bytes: int = 0
    rows: int = 0


class Sink(Protocol):
    """What the tracker asks of a sink. An exception means that the sink is lost until it is opened again."""

    held: Held

    def train(self, values: Mapping[str, float], now: Held) -> None:
        """Show the values of step `now.step`; `now` is how far the sink is once it has them."""

    def validation(self, step: int, values: Mapping[str, float], now: Held) -> None:
        """Show the evaluation of the checkpoint at `step`."""

    def flush(self) -> None:
        """Return when all that was sent would outlive this process, if the sink can promise that."""

    def close(self, failed: bool) -> None: ...


class Opener(Protocol):
    def __call__(self, *, held: Held) -> Sink: ...


def optional(name: str, asked_by: str, package: str) -> ModuleType:
    """The module `name`. ConfigError with what to install when it is absent."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = 'pip install "lockstep-train[track]"'
        raise ConfigError(f"{package} is not installed ({error})", f"asked for by {asked_by}", hint) from error


class TensorBoard:
    """Tags train/* and validation/* under `folder`/tensorboard, each point once.

    held       what was noted at the last flush
    from_step  where the run goes on; None: behind all that was trained
    note       keeps a value for the next start
    """

    def __init__(self, folder: Path, *, held: Held, from_step: int | None, note: Callable[[str, Any], None]) -> None:
        writers = optional("torch.utils.tensorboard", "track.tensorboard", "tensorboard")
        self.protocol = optional("tensorboard.compat.proto.summary_pb2", "track.tensorboard", "tensorboard")
        last = held.step if from_step is None else min(held.step, from_step)
        # Noted before anything is forgotten: a process killed from here on has not got back what it forgot.
        note("tensorboard", asdict(replace(held, step=last)))
        let_newest_be_last(folder / "tensorboard", int(time.time()))
        self.writer = writers.SummaryWriter(str(folder / "tensorboard"), purge_step=last + 1, flush_secs=10)
        self.before = replace(held, step=last)
        # Evaluations are few: all are sent, and those held already are passed over in `validation`.
        self.held = Held(step=last)

    def _add(self, step: int, tag: str, values: Mapping[str, float]) -> None:
        # One event with all tags; add_scalar would make one for each tag, which costs ten times as much.
        summary = self.protocol.Summary
        points = [summary.Value(tag=f"{tag}/{key}", simple_value=value) for key, value in values.items()]
        self.writer.file_writer.add_summary(summary(value=points), step)

    def train(self, values: Mapping[str, float], now: Held) -> None:
        self._add(now.step, "train", values)

    def validation(self, step: int, values: Mapping[str, float], now: Held) -> None:
        if step > self.before.step or now.evaluations_bytes > self.before.evaluations_bytes:
            self._add(step, "validation", values)

    def flush(self) -> None:
        self.writer.flush()

    def close(self, failed: bool) -> None:
        self.writer.close()


def let_newest_be_last(folder: Path, now_s: int) -> None:
    """Rename event files so that one made at `now_s`, by this machine's clock, comes after them all.

    Readers take the files in the order of their names, which begin with the second in which they were made. After two
    starts in one second, or on a machine whose clock is behind the last one's, the newest would be read first or never.
    """
    files = sorted(folder.glob("events.out.tfevents.*"))
    if files and int(files[-1].name.split(".")[3]) >= now_s:
        for number, path in enumerate(files):
            path.rename(path.with_name(".".join(["events.out.tfevents", f"{number:010d}", *path.name.split(".")[4:]])))


class WeightsAndBiases:
    """train/* over train/step and validation/* over validation/step, in one run however often it was started.

    run_id  the same at every start
    run     the configuration to show, but for what `without_secrets` leaves out
    ConfigError when nobody is logged in. A server that cannot be reached is an error of wandb after 30 s at the start
    (WANDB_INIT_TIMEOUT) and of no consequence later: wandb keeps the rows, and tries for 60 s more at the end
    (WANDB_FINISH_TIMEOUT).
    """

    def __init__(self, folder: Path, *, held: Held, mode: str, project: str, run: Mapping[str, Any], run_id: str) -> None:
        wandb = optional("wandb", f'track.wandb="{mode}"', "wandb")
        last = last_offline_row(folder, run_id) if mode == "offline" else None
        limits = {"init_timeout": 30, "finish_timeout": 60}
        limits = {name: limit for name, limit in limits.items() if f"WANDB_{name.upper()}" not in os.environ}
        settings = wandb.Settings(console="off", silent=True, save_code=False, **limits)
        start = {"project": project, "id": run_id, "resume": "allow", "mode": mode, "name": folder.resolve().name}
        try:
            self.run = wandb.init(**start, dir=str(folder), config=without_secrets(run), settings=settings)
        except wandb.errors.UsageError as error:
            hint = 'run "wandb login" once on this machine, or set track.wandb="offline"'
            raise ConfigError(f"Weights & Biases cannot be used: {error}", f'track.wandb="{mode}"', hint) from error
        if mode == "online":
            last = {key: self.run.summary.get(key) for key in ("lockstep/step", "lockstep/evaluations")}
        self.held = held if last is None else held_by(last, self.run.step)
        for axis in ("train", "validation"):
            self.run.define_metric(f"{axis}/step")
            self.run.define_metric(f"{axis}/*", step_metric=f"{axis}/step")
        for key in ("lockstep/step", "lockstep/evaluations"):
            self.run.define_metric(key, hidden=True)
        where = self.run.url if mode == "online" else f"offline under {folder / 'wandb'}; upload with wandb sync"
        log.info("Weights & Biases: run %s, %s", run_id, where)

    def _add(self, row: Mapping[str, float], now: Held) -> None:
        position = {"lockstep/step": now.step, "lockstep/evaluations": now.evaluations_bytes}
        self.run.log({**row, **position}, step=now.rows, commit=True)

    def train(self, values: Mapping[str, float], now: Held) -> None:
        self._add({"train/step": now.step, **{f"train/{key}": value for key, value in values.items()}}, now)

    def validation(self, step: int, values: Mapping[str, float], now: Held) -> None:
        self._add({"validation/step": step, **{f"validation/{key}": value for key, value in values.items()}}, now)

    def flush(self) -> None:
        """Nothing: wandb writes when it likes. What it did write is found at the next start."""

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def held_by(row: Mapping[str, Any], rows: int) -> Held:
    """How far Weights & Biases is by the last row it holds (empty: none); `rows` is the least it has."""
    step, evaluations_bytes, number = (int(row.get(key) or 0) for key in ("lockstep/step", "lockstep/evaluations", "_step"))
    return Held(step=step, evaluations_bytes=evaluations_bytes, rows=max(number, rows))


def last_offline_row(folder: Path, run_id: str) -> dict[str, Any] | None:
    """The last row in this run's local files, newest start first; {} when there is none, None without any file."""
    found = folder.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb")
    files = sorted(found, key=lambda path: path.parent.name.split("run-", 1)[1])  # begins with the time of the start
    protocol = optional("wandb.proto.wandb_internal_pb2", "track.wandb", "wandb")
    for path in reversed(files):
        for tail_bytes in (2**20, path.stat().st_size):
            last: dict[str, Any] = {}
            for record in records(path, tail_bytes):
                message = protocol.Record.FromString(record)
                if message.WhichOneof("record_type") == "history":
                    items = message.history.item
                    last = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            if last:
                return last
    return {} if files else None


BLOCK_BYTES = 32768
HEADER = struct.Struct("<IHB")  # checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last


def records(path: Path, tail_bytes: int) -> Iterator[bytes]:
    """The records that stand whole in about the last `tail_bytes` of a .wandb file; a torn end is left out.

    The format is LevelDB's log after a head of 7 bytes: github.com/google/leveldb/blob/main/doc/log_format.md
    """
    with open(path, "rb", opener=regular) as file:
        begin = max(0, path.stat().st_size - tail_bytes) // BLOCK_BYTES * BLOCK_BYTES
        file.seek(begin)
        data = file.read()
    at = 7 if begin == 0 else 0
    parts: list[bytes] | None = None
    while at + HEADER.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        if kind not in (1, 2, 3, 4) or at + length > len(data):
            return
        if kind in (1, 2):
            parts = []
        if parts is not None:
            parts.append(data[at : at + length])
            if kind in (1, 4):
                yield b"".join(parts)
                parts = None
        at += length


SECRET = re.compile(r"(?i)password|passwd|secret|credential|(api|access|private)_?key|(^|_)auth(orization)?$|(^|_)token$")


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without what is named like a secret, and without user:password@ in addresses."""
    shown: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            shown[key] = without_secrets(value)
        elif SECRET.search(key):
            shown[key] = "(hidden)"
        else:
            shown[key] = re.sub(r"://[^/@\s]+@", "://", value) if isinstance(value, str) else value
    return shown
