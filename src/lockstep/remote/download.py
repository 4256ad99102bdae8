"""Copy the files of a snapshot to this host, every blob verified."""

from __future__ import annotations

import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.folder import COMMITTED
from lockstep.errors import DamagedFileError
from lockstep.files import fsync_folder, open_regular, write_atomic
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import BLOBS, Blob, Files, Snapshot, newest

DOWNLOADS = 8  # at once
RESTORE = "restore an earlier version of this object"
TRIES = 3  # of a blob with other bytes: a network may change them


def download(
    bucket: RunBucket,
    snapshot: Snapshot,
    folder: Path,
    wanted: Callable[[str], bool] = lambda path: True,
    earlier: Path | None = None,
) -> tuple[Snapshot, list[str]]:
    """Write the wanted files to `folder`, which is empty; return (snapshot, problems of
    checkpoints). earlier: a copy of an earlier snapshot. Its blobs are not requested again: most
    of a growing file.

    The snapshot returned is a newer one if the blobs of the first were deleted meanwhile. A damaged
    checkpoint is omitted. DamagedFileError when another file is damaged.
    """
    problems = []
    with ThreadPoolExecutor(DOWNLOADS, "download") as pool:
        for name, files in by_checkpoint(snapshot.files, wanted).items():
            try:
                for path, blobs in files.items():
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(
                        folder / path, contents(pool, bucket, blobs, earlier and earlier / path)
                    )
                if name:
                    fsync_folder(
                        (folder / name).parent
                    )  # write_atomic has flushed the folder itself
            except DamagedFileError as error:
                latest = newest(bucket)
                if (
                    latest
                    and latest.number > snapshot.number
                    and not latest.blobs >= snapshot.blobs
                ):
                    shutil.rmtree(folder)
                    return download(bucket, latest, folder, wanted, earlier)
                if not name:
                    raise
                problems.append(f"{name} is damaged in {bucket.address}: {error.what}")
                shutil.rmtree(folder / name)
    return snapshot, problems


def by_checkpoint(files: Files, wanted: Callable[[str], bool]) -> dict[str, Files]:
    """Group files by the folder of their checkpoint, "" for the others; the marker comes last."""
    groups: dict[str, dict[str, tuple[Blob, ...]]] = {}
    for path in sorted(
        filter(wanted, files), key=lambda path: (path.endswith(f"/{COMMITTED}"), path)
    ):
        name = "/".join(path.split("/")[:2]) if path.startswith("checkpoints/") else ""
        groups.setdefault(name, {})[path] = files[path]
    return dict(groups)


def contents(
    pool: ThreadPoolExecutor, bucket: RunBucket, blobs: Sequence[Blob], earlier: Path | None
) -> Iterator[bytes]:
    """Yield the content of each blob, in order, with a few downloads ahead."""
    waiting: deque[Future[bytes]] = deque()
    offset = 0
    for name, size in blobs:
        waiting.append(pool.submit(read_blob, bucket, name, size, earlier, offset))
        offset += size
        if len(waiting) == DOWNLOADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def read_blob(bucket: RunBucket, name: str, size: int, earlier: Path | None, offset: int) -> bytes:
    """Return the verified content of a blob: from the file `earlier` if it is at `offset` there,
    else from the store. DamagedFileError when it is missing or damaged."""
    if earlier:
        with suppress(FileNotFoundError), open(earlier, "rb", opener=open_regular) as file:
            file.seek(offset)
            if is_blob(content := file.read(size), name, size):
                return content
    for _ in range(TRIES):
        try:
            content = bucket.get(f"{BLOBS}/{name}")
        except FileNotFoundError:
            raise DamagedFileError(
                f"blob {name} is missing", str(bucket.address), RESTORE
            ) from None
        if is_blob(content, name, size):
            return content
    what = f"blob {name} has changed: its sha256 differs, or its size, {len(content)} instead of {size} bytes"
    raise DamagedFileError(what, str(bucket.address), RESTORE)


def is_blob(content: bytes, name: str, size: int) -> bool:
    return len(content) == size and hashlib.sha256(content).hexdigest() == name.rpartition("/")[2]
