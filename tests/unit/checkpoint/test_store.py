"""Resume and retention decisions, file contents, states of checkpoint folders. No torch."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import save

from lockstep.checkpoint import commands, commit, safetensors_io
from lockstep.checkpoint.folder import (
    committed_steps,
    lock_marker,
    pinned,
    retire,
    sweep,
    unlock_marker,
)
from lockstep.checkpoint.policy import choose_resume_step, steps_to_delete
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.errors import CheckpointError, UsageError


@pytest.mark.parametrize(
    ("resume", "steps", "expected"),
    [
        ("auto", [], None),
        ("auto", [100, 300, 200], 300),
        ("required", [100], 100),
        ("never", [100, 200], None),
        ("200", [100, 200, 300], 200),
        ("00000200", [200], 200),
    ],
)
def test_resume_chooses_a_step_with_a_reason(
    resume: str, steps: list[int], expected: int | None
) -> None:
    step, reason = choose_resume_step(resume, steps)
    assert step == expected
    assert (str(expected) if expected is not None else "step 1") in reason


def test_errors_list_the_available_checkpoints() -> None:
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of step 150\n.*checkpoints: 100, 200"
    ):
        choose_resume_step("150", [100, 200])
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        choose_resume_step("required", [])
    with pytest.raises(UsageError, match="'newest' is neither a step nor"):
        choose_resume_step("newest", [100])


@pytest.mark.parametrize(
    ("steps", "keep", "protect", "good", "gone"),
    [
        ([1, 2, 3, 4], 2, [], 4, [1, 2]),
        ([1, 2, 3, 4], 0, [], 4, []),
        ([1, 2, 3, 4], 1, [2], 4, [1, 3]),
        ([1, 2, 3, 4], 2, [], 1, [2]),  # the newest verified one is old: newer ones were never read
        ([7], 1, [], None, []),
        ([], 3, [], None, []),
    ],
)
def test_retention_keeps_the_newest_the_protected_and_the_last_good(
    steps: list[int], keep: int, protect: list[int], good: int | None, gone: list[int]
) -> None:
    assert steps_to_delete(steps, keep=keep, protect=protect, good=good) == gone


ITEMS = st.sampled_from(sorted(safetensors_io.ITEM_BYTES))
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(ITEMS, SHAPES), max_size=8)


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.integers(1, 200), st.randoms(use_true_random=False))
def test_tensors_are_restored_from_files_of_any_size_with_one_digest(
    tensors: dict[str, tuple[str, tuple[int, ...]]], file_bytes: int, random: object
) -> None:
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    data = {spec.name: memoryview(os.urandom(spec.bytes)) for spec in specs}
    parsed = {}
    for part in safetensors_io.split_into_files(specs, file_bytes):
        assert (
            sum(spec.bytes for spec in part) <= file_bytes
            or len([spec for spec in part if spec.bytes]) == 1
        )
        content = memoryview(
            b"".join(
                bytes(chunk)
                for chunk in safetensors_io.file_chunks(part, data.__getitem__, {"a": "b"})
            )
        )
        for spec, view in safetensors_io.parse_file(content)[1]:
            start = content.nbytes - sum(s.bytes for s in part)
            assert start % 8 == 0
            parsed[spec.name] = (spec, view)
    assert {name: (spec, bytes(view)) for name, (spec, view) in parsed.items()} == {
        s.name: (s, bytes(data[s.name])) for s in specs
    }
    digest = safetensors_io.digest_of_fingerprints(
        {s.name: safetensors_io.tensor_fingerprint(s, data[s.name]) for s in specs}
    )
    assert digest == safetensors_io.digest_of_fingerprints(
        {name: safetensors_io.tensor_fingerprint(*pair) for name, pair in parsed.items()}
    )


def test_digest_is_stable_across_versions() -> None:
    lines = {
        n: safetensors_io.tensor_fingerprint(TensorSpec(n, "F32", (2,)), memoryview(n.encode() * 8))
        for n in ("b", "a")
    }
    assert (
        lines["a"]
        == '["a", "F32", [2], "1f3ce40415a2081fa3eee75fc39fff8e56c22270d1a978a7249b592dcebd20b4"]'
    )
    assert (
        safetensors_io.digest_of_fingerprints(lines)
        == "1b8677a8152cd4ca50a695290fd9711bb5d5dfbe4a49a44206f314d7de2c3360"
    )


def test_folder_without_marker_is_not_a_checkpoint(tmp_path: Path) -> None:
    for step in (1, 20, 123_456_789):
        save(tmp_path, step)
    (save(tmp_path, 30) / "COMMITTED").unlink()
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-00000006").write_text("a file")
    save(tmp_path, 40).rename(tmp_path / "step-00000040.damaged")
    assert committed_steps(tmp_path) == [1, 20, 123_456_789]
    assert committed_steps(tmp_path / "missing") == []


def test_checkpoint_renamed_to_another_step_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, 10).rename(tmp_path / "step-00000011")
    ok, lines = commands.verify(tmp_path)
    assert not ok and "do not match: one of them was changed" in lines[0]


def test_later_format_is_not_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    value = json.loads((path / "manifest.json").read_bytes())
    manifest = json.dumps(value | {"format": 2}).encode()
    (path / "manifest.json").write_bytes(manifest)
    (path / "COMMITTED").write_bytes(commit.marker_content(10, manifest))
    with pytest.raises(
        CheckpointError,
        match=r"has format 2, this version reads format 1[\s\S]*newer version of lockstep",
    ):
        commands.verify(tmp_path)


def test_commands_accept_the_run_folder_or_its_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 100)
    save(folder, 200, ["tensors-00000.safetensors", "tensors-00001.safetensors"])
    (folder / ".step-00000300.0123456789abcdef").mkdir()
    assert commands.verify(tmp_path) == commands.verify(folder)
    assert commands.verify(folder)[0]
    table = commands.list_table(tmp_path).splitlines()
    assert (
        len(table) == 4
        and "step-00000200" in table[2]
        and table[3].startswith("not a checkpoint: .step-00000300")
    )
    assert commands.digest_line(tmp_path).startswith("step 200 sha256 ")
    assert commands.digest_line(folder, 100) != commands.digest_line(folder, 200).replace(
        "200", "100"
    )
    (folder / "step-00000200" / "notes.txt").write_text("mine")
    assert commands.verify(tmp_path) == (
        False,
        [
            "step 100 is whole",
            "step 200 is damaged: notes.txt does not belong here: the manifest does not list it",
            "not a checkpoint: .step-00000300.0123456789abcdef",
        ],
    )


def test_folder_without_checkpoints_is_not_whole(tmp_path: Path) -> None:
    assert commands.verify(tmp_path) == (False, [f"there is no committed checkpoint in {tmp_path}"])
    assert "no committed checkpoint" in commands.list_table(tmp_path)
    for call in (
        lambda: commands.digest_line(tmp_path),
        lambda: commands.verify(tmp_path / "missing"),
    ):
        with pytest.raises(CheckpointError, match=r"no checkpoint yet|no such folder"):
            call()
    save(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7\n.*checkpoints: 5"):
        commands.digest_line(tmp_path, 7)


def test_export_writes_only_the_tensors_of_the_model(tmp_path: Path) -> None:
    with commit.Attempt(tmp_path, 3) as attempt:
        attempt.put("facts.json", [b"{}"])
        specs = [
            TensorSpec("model.w", "F32", (4,)),
            TensorSpec("optim.w.exp_avg", "F32", (4,)),
            TensorSpec("model.b", "BF16", (2, 3)),
        ]
        attempt.put(
            "tensors-00000.safetensors",
            safetensors_io.file_chunks(
                specs,
                lambda name: memoryview(name[-1:].encode() * 16)[: 12 if name[-1] == "b" else 16],
            ),
        )
        attempt.commit()
    line = commands.export(tmp_path, None, tmp_path / "out.safetensors")
    assert "step 3: 2 tensors" in line
    exported = {
        spec.name: (spec, data)
        for spec, data in safetensors_io.parse_file(
            safetensors_io.map_file(tmp_path / "out.safetensors")
        )[1]
    }
    assert {
        name: (spec.dtype, spec.shape, bytes(data)) for name, (spec, data) in exported.items()
    } == {
        "w": ("F32", (4,), b"w" * 16),
        "b": ("BF16", (2, 3), b"b" * 12),
    }
    with pytest.raises(CheckpointError, match=r"out.safetensors was not written[\s\S]*missing"):
        commands.export(tmp_path, None, tmp_path / "missing" / "out.safetensors")


def test_commands_do_not_import_torch(tmp_path: Path) -> None:
    save(tmp_path, 5)
    code = (
        "import sys; from pathlib import Path; from lockstep.checkpoint import commands as c; p = Path(sys.argv[1])\n"
        "print(c.list_table(p), c.verify(p), c.digest_line(p), c.export(p, 5, p / 'x')); print('torch' in sys.modules)"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True,
        env=environ,
        capture_output=True,
        text=True,
    ).stdout
    assert "step 5" in shown and shown.endswith("False\n"), shown


def test_sweep_removes_only_abandoned_folders(tmp_path: Path) -> None:
    living = commit.Attempt(tmp_path, 1)
    dead = commit.Attempt(tmp_path, 2)
    dead.put("facts.json", [b"{}"])
    unlock_marker(dead.marker)  # as the kernel does when a process dies
    newborn = tmp_path / ".step-00000003.0123456789abcdef"
    newborn.mkdir()
    retired = save(tmp_path, 4)
    (retired / "COMMITTED").rename(retired / "REMOVING")
    without_marker = save(tmp_path, 5)
    (without_marker / "COMMITTED").unlink()
    renamed = save(tmp_path, 6)
    (renamed / "COMMITTED").rename(renamed / "WRITING")
    foreign = tmp_path / ".step-7.mine"
    foreign.mkdir()
    remaining = {living.path, without_marker, foreign, save(tmp_path, 8)}
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == remaining
    with living as attempt:
        assert attempt.commit()
    assert committed_steps(tmp_path) == [1, 8]


def test_sweep_keeps_foreign_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, 4)
    (path / "COMMITTED").rename(path / "REMOVING")
    (path / "thesis.tex").write_text("mine")
    for _ in range(2):
        sweep(tmp_path)
        assert sorted(os.listdir(path)) == ["REMOVING", "thesis.tex"]
    assert "thesis.tex" in caplog.text


def test_other_things_at_the_name_of_a_checkpoint_are_set_aside(tmp_path: Path) -> None:
    unmarked = save(tmp_path, 4)
    (unmarked / "COMMITTED").unlink()
    save(tmp_path, 4)
    assert (tmp_path / "step-00000004.unmarked" / "manifest.json").is_file()
    (tmp_path / "step-00000005").write_text("a file")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "WRITING").touch()
    (tmp_path / "step-00000006").symlink_to(elsewhere)
    leftover = save(tmp_path, 7)
    (leftover / "COMMITTED").rename(leftover / "WRITING")
    for step in (5, 6, 7):
        save(tmp_path, step)
    assert committed_steps(tmp_path) == [4, 5, 6, 7]
    assert commands.verify(tmp_path)[0]
    assert (elsewhere / "WRITING").exists()
    assert sorted(p.name for p in tmp_path.glob("*.unmarked")) == [
        f"step-0000000{n}.unmarked" for n in (4, 5, 6)
    ]


def test_exactly_one_of_two_commits_of_a_step_wins(tmp_path: Path) -> None:
    with commit.Attempt(tmp_path, 9) as first, commit.Attempt(tmp_path, 9) as second:
        first.put("facts.json", [b"1"])
        second.put("facts.json", [b"2"])
        assert second.commit()
        assert not first.commit()
    assert os.listdir(tmp_path) == ["step-00000009"]
    assert (tmp_path / "step-00000009" / "facts.json").read_bytes() == b"2"
    assert commands.verify(tmp_path)[0]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs /proc/locks to see who waits")
@pytest.mark.parametrize("saved_anew", [True, False])
def test_reader_that_waited_for_a_deletion_reads_the_current_checkpoint(
    tmp_path: Path, saved_anew: bool
) -> None:
    path = save(tmp_path, 9)
    lock = lock_marker(path / "COMMITTED", fcntl.LOCK_EX)  # as retention locks it
    assert lock is not None
    inode = os.fstat(lock).st_ino
    results = []

    def read() -> None:
        with pinned(tmp_path, 9) as checkpoint:
            results.append(
                (checkpoint, lock_marker(path / "COMMITTED", fcntl.LOCK_EX | fcntl.LOCK_NB))
            )

    reader = threading.Thread(target=read)
    reader.start()
    deadline = time.monotonic() + 60
    while not any(
        f":{inode} " in line and "->" in line
        for line in Path("/proc/locks").read_text().splitlines()
    ):
        assert time.monotonic() < deadline and reader.is_alive()
        time.sleep(0.001)
    path.rename(tmp_path / "on its way out")
    if saved_anew:
        save(tmp_path, 9)
    unlock_marker(lock)
    reader.join()
    assert results == [
        (path if saved_anew else None, None)
    ]  # pinned: no other process gets the lock


def test_linked_checkpoint_is_read_but_not_deleted(tmp_path: Path) -> None:
    save(tmp_path / "a", 9)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "step-00000009").symlink_to(tmp_path / "a" / "step-00000009")
    assert commands.verify(tmp_path / "b")[0]
    assert not retire(tmp_path / "b", 9)
    assert commands.verify(tmp_path / "a")[0]
