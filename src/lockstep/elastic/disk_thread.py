"""The thread that accesses the run folder for the membership thread.

A shared disk may block for minutes, and a member without heartbeats counts as gone.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public at run time

from lockstep.elastic.generation_log import (
    Generation,
    GenerationLog,
    Member,
    RunResult,
)
from lockstep.elastic.protocol.state import Effect
from lockstep.elastic.protocol.transitions import Protocol
from lockstep.elastic.run_folder import open_waiting_room
from lockstep.log import log
from lockstep.record.recorder_lock import RECORDER_LOCK, is_recorded
from lockstep.runtime.worker_env import is_loopback_reachable


class DiskThread:
    """Carries out requests in order.

    report              passes an event to `protocol`, on the membership thread
    on_second_training  the liveness file of this unreachable member changes: another host trains in
                        this folder
    """

    def __init__(
        self,
        run: Path,
        generation_log: GenerationLog,
        protocol: Protocol,
        report: Callable[..., None],
        on_second_training: Callable[[Member, float], list[Effect]],
    ) -> None:
        self.run = run
        self.room = open_waiting_room(run)
        self.generation_log = generation_log
        self.protocol = protocol
        self.report = report
        self.on_second_training = on_second_training
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._reading_log = False
        self._next_read_s = 0.0
        self._registered = False  # in the waiting room
        self._waiting: dict[str, Member] = {}  # file name -> worker in the waiting room
        self._liveness: Mapping[str, str] = {}  # id -> newest content of its liveness file
        self._store: TCPStore | None = None  # of the generation that this worker proposed last
        self.thread = threading.Thread(target=self._run, name="lockstep-disk", daemon=True)
        self.thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def read_log(self, known: int) -> None:
        """Read the newest generation above `known`; outside a generation, the waiting room, too."""
        outside = self.protocol.phase == "out"
        if self._reading_log or (outside and time.monotonic() < self._next_read_s):
            return
        self._reading_log = True
        self._next_read_s = time.monotonic() + self.generation_log.folder.pause_s
        writes_liveness = self.protocol.writes_liveness
        registers = outside and self.protocol.join_requested
        members = self.protocol.generation.members

        def read() -> None:
            if registers and not self._registered:
                self.room.register(self.protocol.me)
                self._registered = True
            if writes_liveness:
                self.room.write_liveness(self.protocol.me)
            newest = self.generation_log.newest(known)
            waiting_members = self.room.members(self._waiting) if outside else []
            before = self._liveness
            self._liveness = self.room.read_liveness(members) if outside else {}
            now = self._liveness.items()
            alive = [id for id, content in now if before.get(id, content) != content]
            for member in members:
                if member.id in alive and not is_loopback_reachable(member.loopback):
                    self.report(self.on_second_training, member)
                    return
            self.report(
                lambda now_s: self.protocol.on_log_read(newest, waiting_members, now_s, alive)
            )

        self.submit(read)

    def propose(self, generation: Generation, address: str) -> None:
        """Propose a generation with a store at `address`, which listens before the proposal is
        visible.

        A start waits while a process records the run: the members of the newest generation are
        silent or unreachable, but one of them is paused and not dead. It could not record its
        steps, and its failure would end the run of that one, too.
        """
        is_start = self.protocol.phase == "out" and bool(generation.members)

        def propose() -> None:
            if is_start and is_recorded(self.run):
                self.report(
                    lambda now_s: self.protocol.on_disk_error(
                        now_s,
                        "waiting: another process records this run: "
                        f"it holds {self.run / RECORDER_LOCK} and is paused, "
                        "cut off, or an evaluator; the run starts when it has exited",
                    )
                )
                return
            with socket.create_server((address, 0), backlog=1024) as listener:
                host, port = listener.getsockname()[:2]
                proposal = replace(generation, store=f"{host}:{port}")
                winner = self.generation_log.propose(proposal)
                if winner.token == proposal.token and proposal.members:
                    try:
                        self._store = TCPStore(
                            host,
                            port,
                            len(proposal.members),
                            is_master=True,
                            wait_for_workers=False,
                            master_listen_fd=listener.detach(),
                        )
                    except RuntimeError as error:  # out of descriptors
                        raise OSError(None, f"cannot open a store: {error}") from error
            self.report(self.protocol.on_proposed, winner)

        self.submit(propose)

    def record_end(self, end: RunResult) -> threading.Event:
        """Record the end of the run in the log. The returned event is set after the attempt."""
        done = threading.Event()

        def record() -> None:
            with suppress(OSError):
                recorded = self.generation_log.record_end(
                    end, end.text or "the run ended", self.protocol.after
                )
                self.report(self.protocol.on_proposed, recorded)
            done.set()

        self.submit(record)
        return done

    def unregister(self) -> None:
        def unregister() -> None:
            self.room.unregister(self.protocol.me)
            self._registered = False

        self.submit(unregister)

    def close(self, timeout_s: float) -> None:
        """Remove this worker's files. If the disk blocks, the thread exits with the process."""
        self.submit(lambda: self.room.unregister(self.protocol.me, with_liveness=True))
        self._jobs.put(None)
        self.thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except OSError as error:
                log.debug("run folder: %s", error)
                self.report(self.protocol.on_disk_error)
            finally:
                self._reading_log = False
