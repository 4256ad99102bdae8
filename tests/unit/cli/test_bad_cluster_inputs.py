"""Bad inputs of the commands around a run: each is refused with what happened, where, and what to try.

Nothing is written, no file of the run changes, and no secret is repeated.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

import pytest
from support.written_run import write_run_folder

from lockstep.cli.main import main

SECRET = "very-secret-value"
STORE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ACCESS_KEY_ID": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
}
FILES = {
    "good.toml": "steps = 5\n",
    "broken.toml": "steps = = 5\n",
    "key.toml": "stepz = 5\n",
    "secret.toml": f'track.project = "hf_{SECRET.replace("-", "")}"\n',
    "empty.toml": "",
    "shards.toml": "steps = 5\n[layout]\nshard = 2\n",
    "ssh.toml": 'ssh = true\n[[host]]\nname = "a"\nworkers = 1\n',
    "twins.toml": '[[host]]\nname = "a"\nworkers = 1\n' * 2,
    "own.py": "def main(): ...\n",
    "loop.py": "import lockstep\nsession = lockstep.Session('gs://runs/first', micro_batches=2)\n",
}

RENDER = {
    "slurm good.toml": "the following arguments are required: --nodes",
    "slurm --nodes 2": "the following arguments are required: RUN.toml",
    "pbs good.toml --nodes 2": "invalid choice: 'pbs'",
    "slurm absent.toml --nodes 2": "there is no run file absent.toml",
    "slurm folder --nodes 2": "folder cannot be read: Is a directory",
    "slurm broken.toml --nodes 2": "broken.toml is not TOML",
    "slurm key.toml --nodes 2": "unknown key 'stepz'",
    "slurm secret.toml --nodes 2": "the value of track.project looks like a secret",
    "slurm own.py --nodes 2": "own.py is a script",
    "slurm good.toml --nodes 4:2": "the minimum of '4:2' exceeds its maximum",
    "slurm good.toml --nodes 0": "'0' is not an integer from 1",
    "slurm good.toml --nodes 2:": "'' is not an integer",
    "slurm good.toml --nodes two": "'two' is not an integer",
    "slurm good.toml --nodes 1:2:3": "'2:3' is not an integer",
    "slurm good.toml --nodes -1:2": "expected one argument",
    "slurm good.toml --nodes 99999999999": "is not an integer from 1 to 65,536",
    "slurm good.toml --nodes 2 --gpus -1": "'-1' is not an integer",
    "slurm good.toml --nodes 2 --gpus many": "'many' is not an integer",
    "slurm good.toml --nodes 2 --workers 0": "'0' is not an integer from 1",
    "slurm good.toml --nodes 2 --gpus 2 --workers 4": "--workers 4 with --gpus 2",
    "slurm good.toml --nodes 2 --stepz 3": "unknown key 'stepz'",
    "slurm good.toml --nodes 2:4 --gpus 8": "16 workers, but a step has work for 8",
    "slurm good.toml --nodes 2 --run 'a b'": "'a b' cannot be written",
    "slurm good.toml --nodes 2 --run 'runs/$(reboot)'": "cannot be written",
    "compose good.toml --nodes 1 --image 'A B'": "'A B' cannot be written",
    f"slurm good.toml --nodes 1 --run s3://k:{SECRET}@runs/first": "no address of a bucket",
    "ray shards.toml --nodes 1:2 --workers 3 --run s3://runs/first": "3 workers per host for replicas of 2",
    "slurm good.toml --nodes 2 --out absent/job": "absent/job: No such file or directory",
    "slurm good.toml --nodes 2 --out good.toml": "good.toml exists, with other content",
}
NODES = "launch --nodes 1:2 --host 127.0.0.1 --workers 2 --out new"
LAUNCH = {
    f"{NODES} --hosts absent.toml": "--nodes cannot be combined with --hosts",
    f"{NODES} --ssh": "--nodes cannot be combined with --ssh",
    f"{NODES} --min 5": "--min 5 exceeds the number of workers, 4",
    f"{NODES} --max 9": "--min 2 and --max 9 are invalid: a step has work for 8 workers",
    "launch --nodes 1:2 --stop run": "--nodes cannot be combined with --stop",
    "launch --nodes 1:2 --address 999.1.1.1 --workers 2 --out new": "cannot resolve 999.1.1.1",
    "launch --ray --hosts twins.toml --out new": "--ray cannot be combined with --hosts",
    "launch --ray --ssh --out new": "--ray cannot be combined with --ssh",
    "launch --ray --wait soon --out new": "'soon' is not an integer from 1 to 86,400",
    "launch --hosts absent.toml --host a --out new": "no such hosts file: absent.toml",
    "launch --hosts empty.toml --host a --out new": "Field required",
    "launch --hosts twins.toml --host a --out new": "several hosts are named a",
}
STORED = {
    "train --out gs://runs/first": "gs:// is not supported",
    "train --out s3://": "no address of a bucket",
    f"train --out s3://k:{SECRET}@runs/first": "no address of a bucket",
    "train --out s3://runs/../first": "has other characters, or . or ..",
    "bench comm --workers 2 --out s3://runs/x.json": "was not stored: HTTP error",
    "doctor --out gs://runs/first": "gs:// is not supported",
    "drill --out s3://runs/first": "the prefix was not listed: HTTP error",
    "drill --out s3://runs/../first": "has other characters, or . or ..",
    "plan --measure --devices 1x1:cpu-4GiB --out s3://runs/first": "snapshots was not listed: HTTP error",
    "report s3://runs/first": "report without --out is not supported",
    "report run --out s3://runs/first": "report --out s3:// is not supported",
    "report run --compare s3://runs/first --out c.html": "snapshots was not listed: HTTP error",
    "watch s3://runs/../first": "has other characters, or . or ..",
    "watch s3://runs/first": "snapshots was not listed: HTTP error",
    "launch --ssh --out s3://runs/first": "--ssh needs a list of hosts",
    "evaluate s3://runs/first --follow": "evaluate --follow is not supported",
    "checkpoint import s3://runs/hub --out new": "a Hugging Face folder is not supported",
    "checkpoint export s3://runs/first": "without --out",
    "checkpoint export s3://runs/first --out s3://runs/x": "export --out s3://",
    "run loop.py": "gs:// is not supported",
    "status s3://runs/first": "snapshots was not listed: HTTP error",
    "checkpoint list s3://runs/first": "snapshots was not listed: HTTP error",
}
SHOWN = {
    "report absent": "absent is not a run: there is no such folder",
    "report .": ". is not a run: it has none of",
    "report run --compare absent": "absent is not a run",
    "report run --compare folder/../run": "is compared with itself",
    "report run --out absent/c.html": "cannot be written: No such file or directory",
    "report run --out folder": "cannot be written: Is a directory",
    "report run --bogus": "unknown option",
    "watch absent": "absent is not a run: there is no such folder",
    "watch folder": "folder is not a run: it has none of",
    "watch run --every 0": "'0' is not above zero",
    "watch run --every soon": "'soon' is not a quantity such as '90 s'",
    "watch no-such-host.invalid:run": "ssh does not reach no-such-host.invalid",
    "recipes absent": "there is no recipe 'absent'",
    "completion tcsh": "invalid choice: 'tcsh'",
    "train --on_divergence pray --out new": "on_divergence = 'pray'",
    "train --on_divergence rollback --diloco.learners 2 --diloco.every 5 --out new": "does not support diloco.learners=2",
    "train --on_divergence rollback --layout.pipeline 2 --out new": "does not support layout.pipeline=2",
    "train --divergence.spike -1 --out new": "divergence.spike",
    "train --track.backend MLflow --out new": "track.backend = 'MLflow'",
}
INPUTS = {f"render {words}": problem for words, problem in RENDER.items()} | LAUNCH | STORED | SHOWN


def contents(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file, and "" for each folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("words", INPUTS)
def test_bad_input_is_refused_and_nothing_is_lost(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in STORE.items():
        monkeypatch.setenv(name, value)
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("folder").mkdir()
    write_run_folder(tmp_path / "run")
    before = contents(tmp_path)
    code = main(shlex.split(words))
    out, error = capfd.readouterr()
    assert code == (3 if "HTTP error" in error else 2), error
    lines = error[error.index("Error: ") :].splitlines()
    assert (
        INPUTS[words] in lines[0]
        and len(lines) >= 3
        and all(line.startswith("  ") for line in lines[1:])
    ), error
    assert SECRET not in error + out and SECRET.replace("-", "") not in error + out
    assert contents(tmp_path) == before


def test_there_are_sixty_inputs() -> None:
    assert len(INPUTS) >= 60
