"""Publish or follow a run of several hosts that share no disk, beside the training on this host.

The host of rank 0 of the newest generation publishes its copy as snapshots. The others follow them:
metrics, events and other small files. So any of them can become the host of rank 0. It then
downloads the checkpoints that it lacks, and publishes in turn.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.folder import folder_name, set_aside
from lockstep.elastic.generation_log import GenerationLog
from lockstep.errors import FencedError
from lockstep.log import log
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.download import Follower
from lockstep.remote.snapshots import Files, Ownership, Snapshot, newest, steps_of
from lockstep.remote.upload import Mirror, StoreTask
from lockstep.remote.working_copy import (
    OWN,
    add_owner,
    copy_generations,
    is_listed,
    put_into_copy,
    read_owners,
)

FOLLOW_PAUSE = 20  # each download reads metrics.jsonl from its start


class HostMirror(StoreTask):
    """Publishes the copy of a host while rank 0 trains there, and else follows the snapshots.
    Call it from one thread. seen: files of a snapshot that the copy has, or newer ones"""

    def __init__(self, copy: Path, bucket: RunBucket, host: str, seen: Files) -> None:
        super().__init__(copy, bucket)
        self.host = host
        self.generations = GenerationLog(copy / "generations")
        last = self.generations.newest()
        self.number = last.number
        self.ended = False
        self.leading = last  # the newest generation with members
        self.mirror: Mirror | None = None  # while this host publishes
        self.follower = Follower(bucket, copy, lambda path: not OWN.match(path), seen, FOLLOW_PAUSE)

    @property
    def leads(self) -> bool:
        return bool(self.leading.members) and self.leading.members[0].host == self.host

    def step(self) -> None:
        """Publish or follow."""
        self.read_generations()
        if not self.leads:
            self.mirror = None
            self.follower.update()
            return
        try:
            self.mirror = self.mirror or self.take_over()
            self.mirror.step()
        except FencedError:  # the next generation, led by another host, is about to be read
            self.mirror = None

    def end(self) -> None:
        """Upload the rest and release the run after its end, if this host had its last rank 0. A
        host that leaves a run does neither."""
        copy_generations(self.folder)
        self.read_generations()
        with suppress(FencedError):  # another host has continued the run
            if self.ended and self.leads:
                self.mirror = self.mirror or self.take_over()
                self.mirror.end()

    def read_generations(self) -> None:
        last = self.generations.newest_number(self.number)
        for number in range(self.number + 1, last + 1):
            generation = self.generations.read(number)
            self.number = number
            self.ended = bool(generation.end)
            if generation.members:
                self.leading = generation

    def take_over(self) -> Mirror:
        """Own the run after the snapshots of an earlier generation. FencedError: a later one has
        put some."""
        before, number = newest(self.bucket), self.leading.number
        if before and before.generation >= number and before.owner not in read_owners(self.folder):
            raise FencedError(
                f"generation {before.generation} publishes",
                str(self.bucket.address),
                "this host does not",
            )
        if before:  # now, since the owner of the newest snapshot continues its copy as it is
            add_checkpoints(self.bucket, before, self.folder)
        ownership = Ownership(self.bucket, add_owner(self.folder), before, number)
        log.info(
            "this host publishes the run to %s, from generation %d on", self.bucket.address, number
        )
        return Mirror(self.folder, ownership)


def add_checkpoints(bucket: RunBucket, snapshot: Snapshot, copy: Path) -> None:
    """Bring the checkpoints of a snapshot to the copy of a host that trains. Omit a checkpoint
    that this host has set aside because the run returned to an earlier step."""
    names, folder = [folder_name(step) for step in steps_of(snapshot.files)], copy / "checkpoints"
    wanted = {
        name
        for name in names
        if not any(is_listed(aside, name, snapshot) for aside in folder.glob(f"{name}.abandoned*"))
    }
    for name in wanted:
        with suppress(FileNotFoundError):
            if not is_listed(folder / name, name, snapshot):
                set_aside(folder / name, "abandoned")  # saved before that return, or a second time
    put_into_copy(
        bucket,
        snapshot,
        copy,
        lambda path: "".join(path.split("/")[1:2]) in wanted and not (copy / path).exists(),
    )
