"""The agent's lock and state folder."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.agent.lock import remove_stale_files
from lockstep.runtime.worker_env import identify_process, write_worker_process


def test_files_of_exited_workers_are_removed_and_those_of_running_ones_kept(tmp_path: Path) -> None:
    kept, stale = (
        ["agent.lock"],
        ["0.exit_report", "0.board", "1.json", ".0.exit_report.6967c83e", ".1.board.4711"],
    )
    stale += ["agent.json", ".agent.json.6967c83e"]
    for name in [*kept, *stale]:
        (tmp_path / name).write_text('{"pid": 1, "started": -1}')
    write_worker_process(tmp_path, 2, identify_process(os.getpid()))
    remove_stale_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *stale, "2.json"])
    (tmp_path / "2.json").unlink()
    remove_stale_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == kept
