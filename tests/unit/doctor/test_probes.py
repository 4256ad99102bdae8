"""The facts that a host gathers about the disk where hosts meet."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.checkpoint.store import CheckpointStore
from lockstep.doctor.findings import HostFacts, findings
from lockstep.doctor.probes import claim_name, probes_of, write_probe
from lockstep.errors import CheckpointError


def test_a_disk_without_hard_links_is_found_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    run = str(tmp_path / "run")
    assert write_probe(run, "first")["free_bytes"] > 0
    assert claim_name(probes_of(run), "claim", "first")
    monkeypatch.setattr(os, "link", refuse)
    write_probe(run, "second")
    assert sorted(probes_of(run).names()) == ["claim", "first", "second"]
    is_claimed = claim_name(probes_of(run), "another claim", "second")
    host = replace(HostFacts("here", folder=run), is_claimed=is_claimed)
    (finding,) = findings([host])
    assert (finding.check, finding.level) == ("folder", "FAIL")
    assert "0 hosts have created the same file name by link(2)" in finding.what
    assert "atomic hard links" in finding.hint


def test_a_disk_that_cannot_rename_an_open_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CIFS does."""

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError):
        write_probe(str(tmp_path / "run"), "first")
    with pytest.raises(CheckpointError, match=r"saved here: Permission denied[\s\S]*on CIFS"):
        CheckpointStore(tmp_path / "checkpoints").preflight()
    assert os.listdir(tmp_path / "run" / "doctor") == os.listdir(tmp_path / "checkpoints") == []
