"""Commands with an address where a run folder is given: what is refused, and what the child is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main as command
from lockstep.cli.remote import with_folder
from lockstep.errors import LockstepError
from lockstep.remote.address import Address

ADDRESS, COPY = Address("runs", "first"), Path("/copies/first")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train --out s3://runs/first --steps 3", "train --out /copies/first --steps 3"),
        ("train --out=s3://runs/first/", "train --out=/copies/first"),
        ("run loop.py -- --out s3://runs/first", "run loop.py -- --out /copies/first"),
        ("run loop.py --steps 3", "run --out /copies/first loop.py --steps 3"),
        ("generate s3://runs/first gs://runs/x", "generate /copies/first gs://runs/x"),
        ("checkpoint export s3://runs/first --out s3://runs/second", "checkpoint export /copies/first --out s3://runs/second"),
    ],
)
def test_the_child_gets_the_copy_in_place_of_the_address(words: str, expected: str) -> None:
    assert with_folder(words.split(), ADDRESS, COPY) == expected.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train --out gs://runs/first", "gs:// is not supported"),
        ("train --out s3://", "no address of a bucket"),
        ("train --out s3://k:very-secret-value@runs/first", "no address of a bucket"),
        ("bench comm --out s3://runs/x.json", "lockstep bench is not supported"),
        ("doctor --out s3://runs/first", "lockstep doctor is not supported"),
        ("drill --out s3://runs/first", "lockstep drill is not supported"),
        ("plan --devices 1x1:cpu-4GiB --out s3://runs/first", "lockstep plan is not supported"),
        ("launch --hosts HOSTS.toml --out s3://runs/first", "several hosts"),
        ("launch --ssh --out s3://runs/first", "several hosts"),
        ("evaluate s3://runs/first --follow", "evaluate --follow is not supported"),
        ("checkpoint import s3://runs/hub --out run", "checkpoint import is not supported"),
        ("checkpoint export s3://runs/first", "without --out"),
        ("checkpoint export s3://runs/first --out s3://runs/x", "export --out s3://"),
        ("run loop.py", "gs:// is not supported"),
    ],
)
def test_what_a_store_does_not_support_is_refused(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text("import lockstep\nsession = lockstep.Session('gs://runs/first', micro_batches=2)\n")
    assert command.main(words.split()) == 2
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) == 3 and "very-secret-value" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["loop.py"]


def test_a_worker_of_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockstepError, match="torchrun"):
        command.run_command(["train", "--out", "s3://runs/first"])
