"""SIGKILL at every point of a save and at random moments: the next start finds a whole checkpoint.

Processes are forked from one that has imported torch, so that fifty kills take seconds. Run as a
script, this file is that process: it prints one JSON object for each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launching import run_command
from torch import Tensor

from lockstep.checkpoint.commit import find_damage
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
    """Fork a process that runs `work`, and exits with 1 when it raises; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print(f"child failed: {error!r}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def report(scene: str, **values: Any) -> None:
    print(json.dumps({"scene": scene, **values}), flush=True)


def inspect(folder: Path) -> dict[str, Any]:
    """Return what the next start would load, and which other files there are."""
    checkpoint = store_in(folder).load_newest()
    step = checkpoint.step if checkpoint else 0
    names = sorted(os.listdir(folder))
    return {
        "newest": step,
        "intact": checkpoint is None or digest(checkpoint.tensors) == digest(state(step)),
        "facts": checkpoint.facts if checkpoint else {"step": 0},
        "hidden": [name for name in names if name.startswith(".")],
        "odd": [
            name
            for name in names
            if not STEP_FOLDER.fullmatch(name) and not HIDDEN_FOLDER.fullmatch(name)
        ],
    }


def die_everywhere(folder: Path) -> None:
    """Die at each point of a save in turn; inspect, save again, inspect again."""
    places: list[str] = []
    store_in(folder, fail_point=places.append).save(1, state(1), {"step": 1})
    store_in(folder, fail_point=places.append).save(2, state(2), {"step": 2})
    places.clear()
    store_in(folder, fail_point=places.append).save(3, state(3), {"step": 3})  # retires step 1
    for number, place in enumerate(places):
        step = 4 + number
        countdown = iter(range(number, -1, -1))

        def kill_at_countdown(_: str, countdown: Any = countdown) -> None:
            if next(countdown) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def work(
            step: int = step, kill_at_countdown: Callable[[str], None] = kill_at_countdown
        ) -> None:
            store_in(folder, kill_at_countdown).save(step, state(step), {"step": step})

        _, status = os.waitpid(child(work), 0)
        after_kill = inspect(folder)
        store_in(folder).save(step, state(step), {"step": step})
        after_retry = inspect(folder)
        steps = store_in(folder).steps()
        report(
            "everywhere",
            place=place,
            step=step,
            status=status,
            after_kill=after_kill,
            after_retry=after_retry,
            steps=steps,
        )


def die_at_random(folder: Path, deaths: int) -> None:
    """Kill a child in its first or its second save; inspect; continue from the loaded step."""
    shared = mmap(-1, 8)  # the last step whose save returned: outlives the child
    draw = random.Random(1)
    for step in (1, 2, 3):
        start_s = time.monotonic()
        store_in(folder).save(step, state(step), {"step": step})
        save_s = time.monotonic() - start_s
    for _ in range(deaths):
        last_step = max(store_in(folder).steps(), default=0)
        shared[:] = struct.pack("q", last_step)
        from_child, to_parent = os.pipe()

        def work(last_step: int = last_step, to_parent: int = to_parent) -> None:
            store = store_in(folder)
            for step in range(last_step + 1, last_step + 10_000):
                os.write(to_parent, b"x")
                store.save(step, state(step), {"step": step})
                shared[:] = struct.pack("q", step)

        pid = child(work)
        os.close(to_parent)  # reads end when the child does
        for _ in range(draw.choice((1, 2))):  # until the first or the second save starts
            os.read(from_child, 1)
        time.sleep(draw.uniform(0, save_s))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(from_child)
        report(
            "random", status=status, returned=struct.unpack("q", shared[:])[0], **inspect(folder)
        )
    store_in(folder).save(10**6, state(10**6), {"step": 10**6})
    report("random", names=sorted(os.listdir(folder)), **inspect(folder))


def die_while_reading(folder: Path) -> None:
    """Run retention while another process pins step 1, and after that process has died."""
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
    is_whole = find_damage(folder / "step-00000001", 1) == []
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    store.save(3, state(3), {})
    report("reading", steps=steps_while_read, is_whole=is_whole, then=store.steps())


SCENES = {
    "everywhere": die_everywhere,
    "random": lambda folder: die_at_random(folder, 50),
    "reading": die_while_reading,
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The output of each scene of this file, run as a script."""
    folder = tmp_path_factory.mktemp("scenes")
    result = run_command(
        [sys.executable, __file__, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert "child failed" not in result.stderr, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {scene: [line for line in lines if line["scene"] == scene] for scene in SCENES}


def test_kill_at_every_point_of_a_save_leaves_a_whole_checkpoint(
    scenes: dict[str, list[dict[str, Any]]],
) -> None:
    lines = scenes["everywhere"]
    places = [line["place"] for line in lines]
    assert len(places) > 15
    marked = places.index("marked")
    for number, line in enumerate(lines):
        step, after_kill, after_retry = line["step"], line["after_kill"], line["after_retry"]
        assert line["status"] == signal.SIGKILL, line
        assert after_kill["intact"] and after_kill["newest"] == (
            step if number >= marked else step - 1
        ), line
        assert after_kill["facts"] == {"step": after_kill["newest"]} and not after_kill["odd"], line
        assert after_retry == {
            "newest": step,
            "intact": True,
            "facts": {"step": step},
            "hidden": [],
            "odd": [],
        }, line
        assert line["steps"] == [step - 1, step], line
    names = {
        "started",
        "in facts.json",
        "after manifest.json",
        "sealed",
        "renamed",
        "marked",
        "unmarked",
        "hidden",
        "removing",
    }
    assert names <= set(places)
    assert any(line["after_kill"]["hidden"] for line in lines)  # there were folders to clean up


def test_fifty_kills_at_random_moments_of_a_save(scenes: dict[str, list[dict[str, Any]]]) -> None:
    *deaths, last = scenes["random"]
    assert len(deaths) == 50
    for line in deaths:
        assert line["status"] == signal.SIGKILL, line
        assert line["intact"] and line["facts"] == {"step": line["newest"]} and not line["odd"], (
            line
        )
        # A save that returned is committed; one that did not return may be committed too.
        assert line["returned"] <= line["newest"] <= line["returned"] + 1, line
        assert len(line["hidden"]) <= 2, line
    assert sum(bool(line["hidden"]) for line in deaths) >= 5  # many kills were inside saves
    assert deaths[-1]["newest"] > 3
    assert last["intact"] and last["hidden"] == [] and len(last["names"]) == KEEP


def test_checkpoint_read_by_another_process_is_not_deleted(
    scenes: dict[str, list[dict[str, Any]]],
) -> None:
    assert scenes["reading"] == [
        {"scene": "reading", "steps": [1, 2], "is_whole": True, "then": [3]}
    ]


if __name__ == "__main__":
    for name, play in SCENES.items():
        place = Path(sys.argv[1]) / name
        place.mkdir()
        play(place)
