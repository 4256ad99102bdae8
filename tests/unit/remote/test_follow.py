"""A host that only watches follows the snapshots of a run."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from support import checkpoints
from support.object_store import Proxy

from lockstep.elastic.generation_log import GenerationLog, RunResult
from lockstep.errors import CheckpointError, StoreError
from lockstep.object_store.bucket import RunBucket
from lockstep.remote import download
from lockstep.remote.download import FollowedCopy
from lockstep.remote.upload import Mirror
from lockstep.remote.working_copy import owned_copy


def test_what_describes_a_run_is_copied_and_the_rest_is_not(
    bucket: RunBucket, proxy: Proxy, tmp_path: Path
) -> None:
    (view := tmp_path / "watch" / "first").mkdir(parents=True)
    followed = FollowedCopy(bucket, view)
    with pytest.raises(CheckpointError, match="there is no run"):
        followed.status()
    with owned_copy(bucket, "a") as (copy, ownership):
        mirror = Mirror(copy, ownership)
        checkpoints.save(copy / "checkpoints", 10)
        (copy / "data").mkdir()
        (copy / "data/text.bin").write_text("large")
        lines = "".join(f'{{"step": {step}, "padding": "{"x" * 500}"}}\n' for step in range(1000))
        (copy / "metrics.jsonl").write_text(lines)
        assert mirror.publish()
        status = followed.status()
        assert (
            status["source"].startswith("snapshot 2, put by ")
            and status["source"].endswith(" ago")
            and not status["silent"]
        )
        assert status["run"] == "s3://runs/team/first" and status["ended"] is None
        names = {str(path.relative_to(view)) for path in view.rglob("*") if path.is_file()}
        assert names - {"tracker.lock"} == {"metrics.jsonl", "checkpoints/step-00000010/COMMITTED"}

        (copy / "metrics.jsonl").write_text(lines + '{"step": 1000}\n')
        (copy / "generations").mkdir()
        GenerationLog(copy / "generations").record_end(RunResult(0, ""), "done", after=0)
        assert mirror.publish()
        requests: list[str] = []
        proxy.fault = lambda method, path: requests.append(path) or "" if method == "GET" else ""
        followed.next_s = 0.0
        assert followed.status()["ended"] == {"code": 0, "text": ""}
        assert (view / "metrics.jsonl").read_text() == lines + '{"step": 1000}\n'
        blobs = [path for path in requests if "/blobs/" in path]
        assert len(blobs) == 3, (
            "the last blob of the metrics, which have three, the events, the generation"
        )


def test_an_outage_and_a_lost_host_are_shown(
    bucket: RunBucket, proxy: Proxy, tmp_path: Path
) -> None:
    with owned_copy(bucket, "a") as (copy, ownership):
        (copy / "metrics.jsonl").write_text('{"step": 1}\n')
        assert Mirror(copy, ownership).publish()
    (view := tmp_path / "watch" / "first").mkdir(parents=True)
    proxy.fault = lambda method, path: "cut"
    followed = FollowedCopy(bucket, view)
    with pytest.raises(StoreError):
        followed.status()
    proxy.fault = lambda method, path: ""
    followed.status()
    proxy.fault = lambda method, path: "cut"
    followed.next_s = 0.0
    status = followed.status()
    assert "snapshots was not listed" in status["source"] and (view / "metrics.jsonl").exists()
    with mock.patch.object(
        download.time, "time", return_value=followed.put_s + 5 * followed.snapshot.beat_s + 1
    ):
        assert followed.status()["silent"]
