"""Commands with an address where a run folder is given: what is refused, and what the child is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main as command
from lockstep.cli.remote import with_folder
from lockstep.errors import LockstepError
from lockstep.object_store.address import Address

ADDRESS, COPY = Address("runs", "first"), Path("/copies/first")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train --out s3://runs/first --steps 3", "train --out /copies/first --steps 3"),
        ("train --out=s3://runs/first/", "train --out=/copies/first"),
        ("run loop.py -- --out s3://runs/first", "run loop.py -- --out /copies/first"),
        ("run loop.py --steps 3", "run --out /copies/first loop.py --steps 3"),
        ("generate s3://runs/first gs://runs/x", "generate /copies/first gs://runs/x"),
        (
            "checkpoint export s3://runs/first --out s3://runs/second",
            "checkpoint export /copies/first --out s3://runs/second",
        ),
    ],
)
def test_the_child_gets_the_copy_in_place_of_the_address(words: str, expected: str) -> None:
    assert with_folder(words.split(), ADDRESS, COPY) == expected.split()


def test_a_worker_of_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockstepError, match="torchrun"):
        command.run_command(["train", "--out", "s3://runs/first"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--layout.shard 2", "1 workers per host for replicas of 2"),
        ("plain.py", "a script without lockstep"),
        ("own.py:train --restart all", "--restart all applies to a script"),
    ],
)
def test_what_hosts_without_a_shared_disk_cannot_do_is_refused(
    words: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "store.json").write_text('{"address": "s3://runs/first"}')
    (tmp_path / "plain.py").write_text("print(1)\n")
    names = [str(tmp_path / word) if word == "plain.py" else word for word in words.split()]
    with pytest.raises(LockstepError, match=problem) as caught:
        command.run_command(
            [
                "launch",
                "--nodes",
                "2",
                "--workers",
                "1",
                "--host",
                "127.0.0.1",
                "--out",
                str(tmp_path),
                *names,
            ]
        )
    assert caught.value.where and caught.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.py", "store.json"]
