"""`lockstep render`: refusals, the file that it writes, and `lockstep launch --nodes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.options import node_range

SLURM = ["render", "slurm", "recipes/translate.toml"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([*SLURM, "--nodes", "4:2"], "the minimum of '4:2' exceeds its maximum"),
        ([*SLURM, "--nodes", "0"], "'0' is not an integer from 1"),
        ([*SLURM, "--nodes", "2:"], "'' is not an integer"),
        ([*SLURM, "--nodes", "two"], "'two' is not an integer"),
        ([*SLURM, "--nodes", "1:2:3"], "'2:3' is not an integer"),
        ([*SLURM, "--nodes", "-1:2"], "expected one argument"),
        ([*SLURM, "--nodes", "99999999999"], "is not an integer from 1 to 65,536"),
        (SLURM, "the following arguments are required: --nodes"),
        ([*SLURM, "--nodes", "2", "--gpus", "-1"], "'-1' is not an integer"),
        ([*SLURM, "--nodes", "2", "--gpus", "many"], "'many' is not an integer"),
        ([*SLURM, "--nodes", "2", "--gpus", "2", "--workers", "4"], "--workers 4 with --gpus 2"),
        ([*SLURM, "--nodes", "2", "--steps", "3"], "unknown option '--steps'"),
        ([*SLURM, "--nodes", "2:4", "--gpus", "8"], "16 workers, but a step has work for 8"),
        (["render", "pbs", "recipes/translate.toml", "--nodes", "2"], "invalid choice: 'pbs'"),
        (["render", "slurm", "absent.toml", "--nodes", "2"], "there is no run file absent.toml"),
        (["render", "slurm", "own.py", "--nodes", "2"], "own.py is a script"),
        (["render", "slurm", "--nodes", "2"], "the following arguments are required: RUN.toml"),
        ([*SLURM, "--nodes", "2", "--run", "a b"], "'a b' cannot be written"),
        ([*SLURM, "--nodes", "2", "--image", "A B"], "'A B' cannot be written"),
        ([*SLURM, "--nodes", "2", "--out", "/proc/none/x"], "/proc"),
    ],
)
def test_bad_input_is_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert reason in err and not out, err


def test_a_layout_must_divide_the_workers_of_every_number_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_file_is_written_once_and_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.sbatch"
    words = [*SLURM, "--nodes", "2", "--out", str(out)]
    assert main(words) == 0 and "#SBATCH --nodes=2" in out.read_text()
    assert main(words) == 0, "an equal file is not a conflict"
    out.write_text(f"{out.read_text()}# edited\n")
    assert main(words) == 2 and "exists, with other content" in capsys.readouterr().err
    assert out.read_text().endswith("# edited\n")


def test_a_range_of_nodes() -> None:
    assert node_range("2:4") == (2, 4) and node_range("3") == (3, 3)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--hosts", "absent.toml"], "--nodes cannot be combined with --hosts"),
        (["--ssh"], "--nodes cannot be combined with --ssh"),
        (["--min", "5"], "--min 5 exceeds the number of workers, 4"),
        (["--max", "9"], "--min 2 and --max 9 are invalid: a step has work for 8 workers"),
    ],
)
def test_options_that_contradict_nodes_are_refused(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["launch", "--nodes", "1:2", "--host", "127.0.0.1", "--workers", "2", "--out", str(tmp_path / "run"), *words]
    assert main(command) == 2
    assert reason in capsys.readouterr().err


def test_nodes_cannot_be_combined_with_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--nodes", "1:2", "--stop", str(tmp_path)]) == 2
    assert "--nodes cannot be combined with --stop" in capsys.readouterr().err
