"""Small committed checkpoints for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lockstep.checkpoint import commit, safetensors_io
from lockstep.checkpoint.folder import folder_name
from lockstep.checkpoint.safetensors_io import TensorSpec


def save(
    folder: Path, step: int, files: Iterable[str] = ("tensors-00000.safetensors",), value: int = 0
) -> Path:
    """A committed checkpoint with one tensor of 64 bytes in each file. value: of the bytes; 0: `step`"""
    folder.mkdir(exist_ok=True)
    with commit.Attempt(folder, step) as attempt:
        attempt.put("facts.json", [b"{}\n"])
        for name in files:
            spec = TensorSpec(f"model.{name[8:13]}", "F32", (16,))
            attempt.put(
                name,
                safetensors_io.file_chunks(
                    [spec], lambda _: memoryview(bytes([value or step % 256]) * 64)
                ),
            )
        assert attempt.commit()
    return folder / folder_name(step)
