"""SIGKILL at every point of a save and at random moments: the next start finds a whole checkpoint with the right content.

Processes are forked from one that has imported torch, so that fifty kills take seconds. Run as a script, this file is that process:
it prints one JSON object for each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.folder import HIDDEN_FOLDER, STEP_FOLDER, no_fail_point, pinned
from lockstep.checkpoint.state_dict import digest
from lockstep.checkpoint.store import CheckpointStore

KEEP = 2


def state(step: int) -> dict[str, Tensor]:
    """300 KB in three files that depend on the step only."""
    generator = torch.Generator().manual_seed(step)
    return {f"model.{name}": torch.randn(25_000, generator=generator) for name in "abc"}


def store_in(folder: Path, fail_point: Callable[[str], None] = no_fail_point) -> CheckpointStore:
    return CheckpointStore(folder, keep=KEEP, file_bytes=100_000, fail_point=fail_point)


def child(work: Callable[[], None]) -> int:
    """Fork a process that runs `work` and exits with 0, or with 1 when it raises; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print(f"child failed: {error!r}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def tell(scene: str, **values: Any) -> None:
    print(json.dumps({"scene": scene, **values}), flush=True)


def inspect(folder: Path) -> dict[str, Any]:
    """Return what the next start would load, and which other files there are."""
    found = store_in(folder).load_newest()
    step = found.step if found else 0
    names = sorted(os.listdir(folder))
    return {
        "found": step,
        "right": found is None or digest(found.tensors) == digest(state(step)),
        "facts": found.facts if found else {"step": 0},
        "hidden": [name for name in names if name.startswith(".")],
        "odd": [name for name in names if not STEP_FOLDER.fullmatch(name) and not HIDDEN_FOLDER.fullmatch(name)],
    }


def die_everywhere(folder: Path) -> None:
    """Die at the first point of a save, at the second and so on; after each, inspect, save again and inspect again."""
    places: list[str] = []
    store_in(folder, fail_point=places.append).save(1, state(1), {"step": 1})
    store_in(folder, fail_point=places.append).save(2, state(2), {"step": 2})
    places.clear()
    store_in(folder, fail_point=places.append).save(3, state(3), {"step": 3})  # this one retires step 1
    for number, place in enumerate(places):
        step = 4 + number
        left = iter(range(number, -1, -1))

        def at(_: str, left: Any = left) -> None:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def work(step: int = step, at: Callable[[str], None] = at) -> None:
            store_in(folder, at).save(step, state(step), {"step": step})

        _, status = os.waitpid(child(work), 0)
        after = inspect(folder)
        store_in(folder).save(step, state(step), {"step": step})
        again = inspect(folder)
        steps = store_in(folder).steps()
        tell("everywhere", place=place, step=step, status=status, after=after, again=again, steps=steps)


def die_at_random(folder: Path, deaths: int) -> None:
    """Save step after step in a child that is killed within two saves; inspect; continue from the loaded step."""
    shared = mmap(-1, 8)  # the last step whose save returned: outlives the child
    draw = random.Random(1)
    from_child, to_parent = os.pipe()
    for step in (1, 2, 3):
        began = time.monotonic()
        store_in(folder).save(step, state(step), {"step": step})
        save_s = time.monotonic() - began
    for _ in range(deaths):
        begin = max(store_in(folder).steps(), default=0)
        shared[:] = struct.pack("q", begin)

        def work(begin: int = begin) -> None:
            store = store_in(folder)
            os.write(to_parent, b"x")
            for step in range(begin + 1, begin + 10_000):
                store.save(step, state(step), {"step": step})
                shared[:] = struct.pack("q", step)

        pid = child(work)
        os.read(from_child, 1)
        time.sleep(draw.uniform(0, 2 * save_s))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        tell("random", status=status, returned=struct.unpack("q", shared[:])[0], **inspect(folder))
    store_in(folder).save(10**6, state(10**6), {"step": 10**6})
    tell("random", names=sorted(os.listdir(folder)), **inspect(folder))


def die_while_reading(folder: Path) -> None:
    """A reader in another process pins step 1; retention runs; the reader dies; retention runs again."""
    store = CheckpointStore(folder, keep=1)
    store.save(1, state(1), {"step": 1})
    from_child, to_parent = os.pipe()

    def work() -> None:
        with pinned(folder, 1):
            os.write(to_parent, b"x")
            time.sleep(600)

    pid = child(work)
    os.read(from_child, 1)
    store.save(2, state(2), {})
    steps_while_read = store.steps()
    whole = store.verify(1) == []
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    store.save(3, state(3), {})
    tell("reading", steps=steps_while_read, whole=whole, then=store.steps())


SCENES = {"everywhere": die_everywhere, "random": lambda folder: die_at_random(folder, 50), "reading": die_while_reading}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The output of each scene of this file, run as a script."""
    folder = tmp_path_factory.mktemp("scenes")
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "child failed" not in done.stderr, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {scene: [line for line in lines if line["scene"] == scene] for scene in SCENES}


def test_kill_at_every_point_of_a_save_leaves_a_whole_checkpoint(scenes: dict[str, list[dict[str, Any]]]) -> None:
    lines = scenes["everywhere"]
    places = [line["place"] for line in lines]
    assert len(places) > 15
    marked = places.index("marked")
    for number, line in enumerate(lines):
        step, after, again = line["step"], line["after"], line["again"]
        assert line["status"] == signal.SIGKILL, line
        assert after["right"] and after["found"] == (step if number >= marked else step - 1), line
        assert after["facts"] == {"step": after["found"]} and not after["odd"], line
        assert again == {"found": step, "right": True, "facts": {"step": step}, "hidden": [], "odd": []}, line
        assert line["steps"] == [step - 1, step], line
    assert {"begun", "in facts.json", "after manifest.json", "sealed", "renamed", "marked", "unmarked", "hidden", "removing"} <= set(places)
    assert any(line["after"]["hidden"] for line in lines)  # there was something to clean up


def test_fifty_kills_at_random_moments_of_a_save(scenes: dict[str, list[dict[str, Any]]]) -> None:
    *deaths, last = scenes["random"]
    assert len(deaths) == 50
    for line in deaths:
        assert line["status"] == signal.SIGKILL, line
        assert line["right"] and line["facts"] == {"step": line["found"]} and not line["odd"], line
        # A save that returned is there; one that did not may be there too, whole.
        assert line["returned"] <= line["found"] <= line["returned"] + 1, line
        assert len(line["hidden"]) <= 2, line
    assert sum(bool(line["hidden"]) for line in deaths) >= 5  # the moments really lay inside saves
    assert deaths[-1]["found"] > 3
    assert last["right"] and last["hidden"] == [] and len(last["names"]) == KEEP


def test_checkpoint_read_by_another_process_is_not_deleted(scenes: dict[str, list[dict[str, Any]]]) -> None:
    assert scenes["reading"] == [{"scene": "reading", "steps": [1, 2], "whole": True, "then": [3]}]


if __name__ == "__main__":
    for name, play in SCENES.items():
        place = Path(sys.argv[1]) / name
        place.mkdir()
        play(place)
