"""Run folders of each released version are opened by this one: status, verify, digest, resume (tests/formats)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launching import ROOT, one_thread, run_lockstep, unpack

import lockstep
from lockstep.checkpoint import commit
from lockstep.config import saved_run

ARCHIVES = sorted((Path(__file__).parents[1] / "formats").glob("*.tar.gz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    unpack(request.param, tmp_path)
    return tmp_path


def lines_of(folder: Path, *words: object) -> str:
    done = run_lockstep(*words, cwd=folder, env=one_thread(LOCKSTEP_TMP=str(folder)))
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_status_verify_digest_and_resume_open_a_folder_of_a_released_version(folder: Path) -> None:
    resume = {
        "recipe": ["train", "--workers", 2, "--steps", 6, "--out", "recipe"],
        "session": ["run", "loop.py", "--workers", 2, "--steps", 6],
    }
    for name, digest in json.loads((folder / "digests.json").read_text()).items():
        assert "ended with exit code 0" in lines_of(folder, "status", name)
        lines_of(folder, "checkpoint", "verify", name)
        assert lines_of(folder, "checkpoint", "digest", name).strip() == digest
        lines_of(folder, *resume[name])
        assert lines_of(folder, "checkpoint", "digest", name).startswith("step 6 sha256 ")
        steps = [
            json.loads(line)["step"]
            for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps == [1, 2, 3, 4, 5, 6], "resumed, not started again"
        page = (ROOT / "docs" / "reference" / "run-folder.md").read_text()
        listed = {
            entry.name
            for entry in (folder / name).iterdir()
            if f"`{entry.name}" in page or entry.suffix == ".lock"
        }
        assert listed == {entry.name for entry in (folder / name).iterdir()}, (
            "docs/reference/run-folder.md lists every entry"
        )


def test_this_version_has_a_folder_with_its_format_numbers(tmp_path: Path) -> None:
    """A new version or format number needs a folder: python tests/formats/make.py."""
    assert f"{lockstep.__version__}.tar.gz" in [path.name for path in ARCHIVES]
    unpack(ARCHIVES[0].with_name(f"{lockstep.__version__}.tar.gz"), tmp_path)
    assert json.loads((tmp_path / "recipe" / "run.json").read_text())["format"] == saved_run.FORMAT
    for manifest in tmp_path.glob("*/checkpoints/step-*/manifest.json"):
        assert json.loads(manifest.read_text())["format"] == commit.FORMAT


def test_another_format_is_refused_with_its_number(folder: Path) -> None:
    path = folder / "recipe" / "run.json"
    value = json.loads(path.read_text())
    value.pop("sha256")
    saved_run.write_json(path, saved_run.add_checksum(value | {"format": 99}))
    done = run_lockstep("train", "--out", "recipe", cwd=folder)
    assert (
        done.returncode == 3
        and f"reads runs of format {saved_run.FORMAT}, not of format 99" in done.stderr
    )
