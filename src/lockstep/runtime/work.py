"""Waiting for what travels between workers, and giving it up when the generation has come to its end.

A send or a receive of gloo that has not begun ends with an error as soon as its connection is cut. One that is under way does not (torch
2.13: `pair.cc` tells those that wait in its queues, not the one whose bytes it is just moving), and a C++ wait cannot be called off: the
thread would sit there for the whole time-out of the group. So it is a thread of its own that waits. When the generation is over and the
connections are cut, that one is left behind, with what it waits for, until its time has run out.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import PeersLostError
from lockstep.runtime.process_group import limit

LOOK_S = 0.05
GRACE_S = 0.2  # from the end of a generation, within which whatever has not begun ends by itself (it takes milliseconds)


def for_life() -> str:
    """A group that is for life is never broken."""
    return ""


class Waits:
    """For any number of threads.

    broken  why the generation has come to its end; "" while it lives
    aside   wait in a thread beside, where there are generations; False on an accelerator, where a wait only tells the caller's stream
    """

    def __init__(self, broken: Callable[[], str] = for_life, *, aside: bool = True) -> None:
        self.broken, self.aside = broken, aside
        self._own = threading.local()  # the helper of each thread that waits

    def finish(self, works: Iterable[dist.Work | None], group: dist.ProcessGroup | None = None) -> None:
        """Collective. Return when all of them are done, as long as a collective of the group may take.

        (Without a limit of their own gloo ends sends and receives after the time that the group had to form: torch's way to give a group
        another time-out does not reach them, 2.13.)
        Errors: PeersLostError when the generation ended meanwhile; else what torch raises.
        """
        begun = [work for work in works if work is not None]
        if not begun:
            return
        if not self.aside or self.broken is for_life:
            if error := wait(begun, limit(group)):
                raise error
            return
        helper: Helper | None = getattr(self._own, "helper", None)
        if helper is None:
            helper = self._own.helper = Helper()
        helper.asked.put((begun, limit(group)))
        over_s = None
        while True:
            try:
                error = helper.told.get(timeout=LOOK_S)
                break
            except queue.Empty:
                now_s, why = time.monotonic(), self.broken()
                over_s = (over_s or now_s) if why else None
                if over_s is not None and now_s - over_s > GRACE_S:
                    self._own.helper = None
                    raise PeersLostError(why, "something was on its way when the connections were cut") from None
        if error is not None:
            raise error


Asked = queue.SimpleQueue[tuple[list[dist.Work], timedelta] | None]
Told = queue.SimpleQueue[Exception | None]


class Helper:
    """A thread that waits for one thing after the other; it ends when nobody has this any more."""

    def __init__(self) -> None:
        self.asked: Asked = queue.SimpleQueue()
        self.told: Told = queue.SimpleQueue()
        threading.Thread(target=serve, args=(self.asked, self.told), name="lockstep-wait", daemon=True).start()
        weakref.finalize(self, self.asked.put, None)


def serve(asked: Asked, told: Told) -> None:
    """The thread of a helper."""
    while (job := asked.get()) is not None:
        error = wait(*job)
        del job  # it holds the group, as does the error's traceback
        told.put(error)
        del error


def wait(works: list[dist.Work], most: timedelta) -> Exception | None:
    """Wait for all of them; what torch raised."""
    try:
        for work in works:
            work.wait(most)
    except Exception as error:
        return error.with_traceback(None)
    return None
