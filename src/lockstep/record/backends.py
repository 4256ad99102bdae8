"""Metric backends: TensorBoard, Weights & Biases, and a class of the user (docs/loop.md). Optional
packages, imported only when enabled.

When a backend opens it reports its position (`cursor`), and the tracker sends the rest from the
run's files.

TensorBoard's file lacks the last seconds of a killed process. The tracker stores the cursor at each
flush; the next start rewinds to it (`purge_step`: readers drop all points from that step on).

Weights & Biases cannot rewind, its offline mode cannot resume (0.31: a new folder for each start),
and it loses the last seconds of a killed process. So every row has the cursor under the hidden keys
`lockstep/*`, and the last row that arrived has the position: online in the server's summary,
offline at the end of the newest file.
"""

import importlib
import json
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from lockstep.errors import ConfigError, missing_package
from lockstep.files import open_regular
from lockstep.log import log

Axis = Literal["train", "validation"]


@dataclass(frozen=True)
class Cursor:
    """How far a backend is: last step, bytes of evaluations.jsonl sent, rows sent in all."""

    step: int = 0
    evaluations_bytes: int = 0
    rows: int = 0


class Backend(Protocol):
    """The methods that the tracker calls, from one thread. After an exception it closes the
    backend, and opens it again at the next checkpoint or start. It constructs a class of the user
    as Class(folder, cursor, run=..., run_id=...).
    """

    def add(self, axis: Axis, step: int, values: Mapping[str, float], now: Cursor) -> None:
        """Add the values of a step, or the evaluation of its checkpoint. now: the cursor after
        them."""

    def flush(self) -> None:
        """Store what was added: the tracker notes the cursor, and what comes after it is sent
        again to the next start."""

    def close(self, failed: bool) -> None: ...


def load_backend(name: str) -> Callable[..., Backend]:
    """Return the class MODULE:CLASS; modules of the current folder are found too. ConfigError."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        backend: Callable[..., Backend] = getattr(importlib.import_module(module), attribute)
        if missing := [
            method
            for method in ("add", "flush", "close")
            if not callable(getattr(backend, method, None))
        ]:
            raise AttributeError(f"no method {', '.join(missing)}")
        return backend
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the metric backend {name!r} cannot be loaded: {error}",
            "track.backend",
            "write MODULE:CLASS of an importable module; docs/loop.md lists the four methods",
        ) from error
    finally:
        sys.path.remove(os.getcwd())


def import_optional(name: str, asked_by: str, package: str) -> ModuleType:
    """Import the module `name`. ConfigError with the package to install when it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        problem = f"is not installed ({error})"
        raise missing_package(package, "track", f"enabled by {asked_by}", problem) from error


class TensorBoard:
    """Tags train/* and validation/* under `folder`/tensorboard, each point once.

    cursor     as stored at the last flush
    from_step  step at which the run resumes; None: after all trained steps
    note       stores a value for the next start
    """

    def __init__(
        self,
        folder: Path,
        cursor: Cursor,
        *,
        from_step: int | None,
        note: Callable[[str, Any], None],
    ) -> None:
        writers = import_optional("torch.utils.tensorboard", "track.tensorboard", "tensorboard")
        self.protocol = import_optional(
            "tensorboard.compat.proto.summary_pb2", "track.tensorboard", "tensorboard"
        )
        last = cursor.step if from_step is None else min(cursor.step, from_step)
        self.noted = replace(cursor, step=last)
        # Stored before points are purged: after a kill here the next start sends them again.
        note("tensorboard", asdict(self.noted))
        rename_older_event_files(folder / "tensorboard", int(time.time()))
        self.writer = writers.SummaryWriter(
            str(folder / "tensorboard"), purge_step=last + 1, flush_secs=10
        )
        # There are few evaluations: the tracker sends all, and `add` skips the old ones.
        self.cursor = Cursor(step=last)

    def add(self, axis: Axis, step: int, values: Mapping[str, float], now: Cursor) -> None:
        """Add the values of a step, or the evaluation of its checkpoint. now: the cursor after
        them."""
        if (
            axis == "validation"
            and step <= self.noted.step
            and now.evaluations_bytes <= self.noted.evaluations_bytes
        ):
            return
        # One event with all tags: add_scalar writes one per tag, which takes ten times as long.
        summary = self.protocol.Summary
        points = [
            summary.Value(tag=f"{axis}/{key}", simple_value=value) for key, value in values.items()
        ]
        self.writer.file_writer.add_summary(summary(value=points), step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self, failed: bool) -> None:
        self.writer.close()


def rename_older_event_files(folder: Path, now_s: int) -> None:
    """Rename event files so that one created at `now_s`, by this machine's clock, sorts after them:
    readers sort them by the second of creation in their names, which may repeat or decrease."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    if files and int(files[-1].name.split(".")[3]) >= now_s:
        for number, path in enumerate(files):
            path.rename(
                path.with_name(
                    ".".join(["events.out.tfevents", f"{number:010d}", *path.name.split(".")[4:]])
                )
            )


class WeightsAndBiases:
    """train/* over train/step and validation/* over validation/step, in one run across all starts.

    run_id  the same for every start
    run     configuration to show, except what `without_secrets` hides
    ConfigError when the user is not logged in. WANDB_INIT_TIMEOUT (30 s) and WANDB_FINISH_TIMEOUT
    (60 s) bound the waits for an unreachable server; between them wandb keeps the rows.
    """

    def __init__(
        self,
        folder: Path,
        cursor: Cursor,
        *,
        mode: str,
        project: str,
        run: Mapping[str, Any],
        run_id: str,
    ) -> None:
        wandb = import_optional("wandb", f'track.wandb="{mode}"', "wandb")
        last = last_offline_row(folder, run_id) if mode == "offline" else None
        limits = {"init_timeout": 30, "finish_timeout": 60}
        limits = {
            name: limit
            for name, limit in limits.items()
            if f"WANDB_{name.upper()}" not in os.environ
        }
        settings = wandb.Settings(console="off", silent=True, save_code=False, **limits)
        start = {
            "project": project,
            "id": run_id,
            "resume": "allow",
            "mode": mode,
            "name": folder.resolve().name,
        }
        try:
            self.run = wandb.init(
                **start, dir=str(folder), config=without_secrets(run), settings=settings
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"Weights & Biases cannot be used: {error}",
                f'track.wandb="{mode}"',
                'run "wandb login" on this machine, or set track.wandb="offline"',
            ) from error
        if mode == "online":
            last = {
                key: self.run.summary.get(key) for key in ("lockstep/step", "lockstep/evaluations")
            }
        self.cursor = cursor
        if last is not None:  # the last row that arrived; {} when there is none
            sent = [
                int(last.get(key) or 0)
                for key in ("lockstep/step", "lockstep/evaluations", "_step")
            ]
            self.cursor = Cursor(
                step=sent[0], evaluations_bytes=sent[1], rows=max(sent[2], self.run.step)
            )
        for axis in ("train", "validation"):
            self.run.define_metric(f"{axis}/step")
            self.run.define_metric(f"{axis}/*", step_metric=f"{axis}/step")
        for key in ("lockstep/step", "lockstep/evaluations"):
            self.run.define_metric(key, hidden=True)
        where = (
            self.run.url
            if mode == "online"
            else f"offline under {folder / 'wandb'}; upload with wandb sync"
        )
        log.info("Weights & Biases: run %s, %s", run_id, where)

    def add(self, axis: Axis, step: int, values: Mapping[str, float], now: Cursor) -> None:
        position = {"lockstep/step": now.step, "lockstep/evaluations": now.evaluations_bytes}
        row = {f"{axis}/step": step, **{f"{axis}/{key}": value for key, value in values.items()}}
        self.run.log({**row, **position}, step=now.rows, commit=True)

    def flush(self) -> None:
        """Do nothing: wandb decides when to write. The next start finds what it has written."""

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def last_offline_row(folder: Path, run_id: str) -> dict[str, Any] | None:
    """Return the last row in this run's local files; {} when there is none, None without files."""
    paths = folder.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb")
    # The name starts with the time of the start.
    files = sorted(paths, key=lambda path: path.parent.name.split("run-", 1)[1])
    protocol = import_optional("wandb.proto.wandb_internal_pb2", "track.wandb", "wandb")
    for path in reversed(files):
        for tail_bytes in (2**20, path.stat().st_size):
            last: dict[str, Any] = {}
            for record in wandb_records(path, tail_bytes):
                message = protocol.Record.FromString(record)
                if message.WhichOneof("record_type") == "history":
                    items = message.history.item
                    last = {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    }
            if last:
                return last
    return {} if files else None


BLOCK_BYTES = 32768
HEADER = struct.Struct("<IHB")  # checksum, length, kind: 1 full, 2 first, 3 middle, 4 last


def wandb_records(path: Path, tail_bytes: int) -> Iterator[bytes]:
    """Yield the whole records in about the last `tail_bytes` of a .wandb file; skip a torn end.
    The format: 7 bytes, then a LevelDB log (github.com/google/leveldb, doc/log_format.md)."""
    with open(path, "rb", opener=open_regular) as file:
        start = max(0, path.stat().st_size - tail_bytes) // BLOCK_BYTES * BLOCK_BYTES
        file.seek(start)
        data = file.read()
    at = 7 if start == 0 else 0
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


SECRET = re.compile(
    r"(?i)password|passwd|secret|credential|(api|access|private)_?key"
    r"|(^|_)auth(orization)?$|(^|_)token$"
)


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with secrets hidden, by name, and without user:password@ in URLs."""
    public: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            public[key] = without_secrets(value)
        elif SECRET.search(key):
            public[key] = "(hidden)"
        else:
            public[key] = re.sub(r"://[^/@\s]+@", "://", value) if isinstance(value, str) else value
    return public
