"""`lockstep render`: sizes that do not fit, and the file that it writes (test_bad_cluster_inputs.py: bad words)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.options import node_range

SLURM = ["render", "slurm", "recipes/translate.toml"]


def test_a_layout_must_divide_the_workers_of_every_number_of_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "sharded.toml"
    run.write_text("layout.shard = 4\n[batch]\nmicro_batches = 16\n")
    assert main(["render", "slurm", str(run), "--nodes", "2:4", "--gpus", "2"]) == 0
    assert main(["render", "slurm", str(run), "--nodes", "1:4", "--gpus", "2"]) == 2
    assert "it needs 4 workers, 2 are running" in capsys.readouterr().err
    assert main(["render", "slurm", str(run), "--nodes", "2:3", "--gpus", "2"]) == 2
    err = capsys.readouterr().err
    assert "6 are running" in err and "--nodes 2:3, 2 workers per node" in err


def test_workers_beyond_the_micro_batches_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SLURM, "--nodes", "1:4", "--gpus", "4"]) == 0
    assert "a step has work for 8 workers: 8 of 16 are on standby" in capsys.readouterr().err


def test_a_file_is_written_once_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.sbatch"
    words = [*SLURM, "--nodes", "2", "--out", str(out)]
    assert main(words) == 0 and "#SBATCH --nodes=2" in out.read_text()
    assert main(words) == 0, "an equal file is not a conflict"
    out.write_text(f"{out.read_text()}# edited\n")
    assert main(words) == 2 and "exists, with other content" in capsys.readouterr().err
    assert out.read_text().endswith("# edited\n")


def test_a_range_of_nodes() -> None:
    assert node_range("2:4") == (2, 4) and node_range("3") == (3, 3)
