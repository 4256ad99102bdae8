"""A user's loop in an object store: the copy is mirrored whole, and released at the end."""

from __future__ import annotations

from pathlib import Path

from support.object_store import Proxy, StoreHost, newest_of, s3_server
from support.processes import SUPPORT

from lockstep.checkpoint.commands import verify
from lockstep.remote.snapshots import steps_of

RUN = "s3://runs/team/loop"


def test_a_loop_whose_session_names_a_store_is_mirrored(tmp_path: Path) -> None:
    with s3_server() as server, Proxy(server) as proxy:
        host = StoreHost(tmp_path / "a", proxy)
        done = host.run("run", "--workers", 1, SUPPORT / "stored_loop.py", "--steps", 6)
        assert done.returncode == 0, done.stderr
        snapshot = newest_of(proxy, RUN)
        assert (
            snapshot.released
            and steps_of(snapshot.files) == [3, 6]
            and "metrics.jsonl" in snapshot.files
        )
        (copy,) = (tmp_path / "a/cache").glob("*/loop")
        assert verify(copy) == (True, ["step 3 is whole", "step 6 is whole"])
        listed = host.run("checkpoint", "list", RUN)
        assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == ["3", "6"]
