"""The command: words, exit codes, and no torch where a command does not need it."""

from __future__ import annotations

import argparse
import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lockstep.cli import options
from lockstep.cli.main import (
    becomes_agent,
    main,
    refuse_mistyped,
    split_script,
    split_values,
)
from lockstep.cli.script import imports_parser, names_option
from lockstep.errors import UsageError

COMMANDS = (
    "train",
    "run",
    "launch",
    "status",
    "drill",
    "evaluate",
    "translate",
    "generate",
    "checkpoint",
    "bench",
    "doctor",
    "lab",
    "plan",
    "render",
    "recipes",
    "completion",
    "watch",
    "report",
)
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
PROGRAM = Path(__file__).parents[2] / "support" / "command_without_torch.py"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        *[([command, "--help"], 0) for command in COMMANDS],
        (["trian"], 2),
        (["train", "--optim.lr", "1"], 2),
        (["launch", "--bogus", "1"], 2),
        (["status", "absent"], 2),
        (["status", "absent", "--bogus"], 2),
        (["watch", "absent"], 2),
        (["report", "absent"], 2),
        (["checkpoint", "digest", "absent"], 3),
        (["train", "--show"], 0),
        (["train", "--out", "gs://runs/first"], 2),
        (["doctor", "--out", "gs://runs/first"], 2),
        (["lab", "reduce", "--ranks", "8", "--bytes", "5 MB", "--rate", "1 MB/s"], 0),
        (["bench"], 2),
        (["bench", "comm", "--workers", "1"], 2),
        (["bench", "comm", "--hosts", "absent.toml"], 2),
        (["doctor", "--hosts", "absent.toml"], 2),
        (["plan", "--devices", "2x2:cpu-4GiB"], 2),
        (["plan", "--devices", "4x8:H100", "--link", "100Gbit/s"], 2),
        (["plan", "--devices", "2x2:cpu-4GiB", "--link", "1Gbit/s", "--optim.lr", "1"], 2),
        (["render", "slurm", "recipes/translate.toml", "--nodes", "1:2"], 0),
        (["render", "slurm", "absent.toml", "--nodes", "1:2"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_refusals_do_not_import_torch(words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr


def test_light_modules_do_not_import_torch() -> None:
    modules = ["config.schema", "runtime.environment", "data.order", "agent.agent"]
    modules += [
        "cli.train",
        "cli.run",
        "cli.launch",
        "cli.status",
        "cli.watch",
        "cli.report",
        "cli.drill",
        "cli.evaluate",
    ]
    modules += ["cli.generate", "cli.checkpoint", "cli.recipes", "cli.completion", "cli.render"]
    modules += [
        "cli.bench",
        "cli.doctor",
        "cli.lab",
        "cli.plan",
        "doctor.peers",
        "network.measurements",
    ]
    code = f"import sys, {', '.join('lockstep.' + name for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_command_and_option_has_a_help_text() -> None:
    parser = options.build_parser()
    for name in COMMANDS:
        command = parser.commands[name]
        assert command.description
        assert all(action.help or action.choices for action in command._actions), name


def test_an_integer_option_has_bounds() -> None:
    parse = options.integer(0, 2**63 - 1)
    assert (parse("0"), parse("9223372036854775807")) == (0, 2**63 - 1)
    for text in ("-1", "1.5", "x", "", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError, match="is not an integer from 0 to"):
            parse(text)


def test_the_spelling_of_an_option_decides_its_type_and_default() -> None:
    parse = options.build_parser().parse_args
    scored = parse(["evaluate", "runs/a", "--split", "test"])
    assert (scored.folder, scored.step, scored.split) == (Path("runs/a"), None, "test")
    assert (scored.beams, scored.average, scored.workers, scored.follow) == (1, 0, None, False)
    continued = parse(["generate", "m", "a", "b", "--stop", "x", "--stop", "y"])
    assert (continued.text, continued.stop, continued.temperature) == (["a", "b"], ["x", "y"], 0.0)
    link = ["--rate", "1 MB/s", "--bytes", "1 kB"]
    lab = parse(["lab", "reduce", "--ranks", "2", *link])
    assert (lab.collective, lab.bytes, lab.latency, lab.algorithm) == ("reduce", 1000, 0.0, None)
    job = parse(["render", "slurm", "a.toml", "--nodes", "2:4", "--run", "s3://bucket/run"])
    assert (job.nodes, job.gpus, job.run) == ((2, 4), 0, "s3://bucket/run")
    run = parse(["run", "a.py", "-m", "pkg.mod", "--layout.shard", "2", "--track", "wandb"])
    assert (run.module, vars(run)["layout.shard"], run.track) == ("pkg.mod", 2, ["wandb"])
    assert parse(["watch", "a"]).every == 2.0 and parse(["doctor"]).out == Path("runs/default")
    assert parse(["checkpoint", "export", "a"]).shard_bytes == 5 * 10**9
    with pytest.raises(UsageError, match="are required: --devices"):
        parse(["plan"])


def test_values_of_a_run_are_separated_from_options() -> None:
    train = options.build_parser().commands["train"]
    words = [
        "run.toml",
        "--steps",
        "3",
        "--out",
        "a",
        "--optim.clip_norm=0",
        "--resume=never",
        "--seed",
    ]
    assert split_values(train, words) == (
        ["run.toml", "--out", "a", "--resume=never"],
        ["--steps", "3", "--optim.clip_norm=0", "--seed"],
    )
    words = ["loop.py:main", "--no-augment", "--workers", "2"]
    assert split_values(train, words) == (["loop.py:main", "--workers", "2"], ["--no-augment"])


def test_arguments_behind_a_script_are_its_own() -> None:
    parser = options.build_parser()
    assert split_script(parser, ["run", "--out", "a", "my.py", "--steps", "3"]) == (
        ["run", "--out", "a"],
        "my.py",
        ["--steps", "3"],
    )
    assert split_script(parser, ["train", "my.py", "--steps", "3"]) == (
        ["train", "my.py", "--steps", "3"],
        "",
        [],
    )


def test_a_word_that_is_not_utf8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "run", "\udcff"]) == 2
    assert "is not valid UTF-8" in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0


def test_a_stop_signal_during_the_imports_ends_process_1_of_a_container(tmp_path: Path) -> None:
    """The kernel would drop it: process 1 has no default action."""
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no process namespaces here")
    os.mkfifo(run_file := tmp_path / "run.toml")
    outer = subprocess.Popen([*namespace, sys.executable, "-m", "lockstep", "train", str(run_file)])
    try:
        with open(run_file, "w"):  # the command reads its run file now, before the agent starts
            (inner,) = psutil.Process(outer.pid).children()
            inner.send_signal(signal.SIGTERM)
            assert outer.wait(20) == 128 + signal.SIGTERM
    finally:
        outer.kill()
        outer.wait()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "there is no checkpoint yet"),
        (["--adapter"], "there is no model.json: the run has not started to train"),
    ],
)
def test_a_run_that_never_started_has_nothing_to_export(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("generations", "logs", "waiting"):
        (tmp_path / "run" / name).mkdir(parents=True)
    assert (
        main(
            ["checkpoint", "export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), *words]
        )
        == 3
    )
    error = capsys.readouterr().err
    assert what in error and "wait for" in error and len(error.splitlines()) == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "environ", "starts"),
    [
        (["train"], {}, True),
        (["train", "run.toml"], {}, True),
        (["run", "loop.py"], {}, True),
        (["train", "--show"], {}, False),
        (["train", "--layout", "auto"], {}, False),  # which times this machine first
        (["train", "loop.py:main"], {}, False),
        # Values that become variables of the workers, and what replaces this process.
        (["run", "loop.py", "--track", "tensorboard"], {}, False),
        (["run", "loop.py", "--layout.shard", "2"], {}, False),
        (["train", "--profile", "1:2"], {}, False),
        (["run", "loop.py", "--help"], {}, False),
        (["train"], {"RANK": "0"}, False),  # the start names what is missing
        (["train"], TORCHRUN, False),
        (["evaluate", "runs/default"], {}, False),
    ],
)
def test_only_a_process_that_starts_workers_imports_torch_early(
    words: list[str], environ: dict[str, str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ours, rest = (words[:-1], words[-1:]) if words[-1] == "--help" else (words, [])
    args, _ = options.build_parser().parse_known_args(ours)
    assert becomes_agent(args, rest) == starts


LOOP = (
    "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--num-workers')\n"
)


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ("replay runs/x --stepp 3", "unknown option '--stepp'", "perhaps --step"),
        ("status runs/x --jsn", "unknown option '--jsn'", "perhaps --json"),
        ("status runs/x --zzz", "unknown option '--zzz'", "see lockstep status --help"),
        ("status runs/x more", "unexpected word 'more'", "see lockstep status --help"),
        ("status runs/x json", "unexpected word 'json'", "perhaps --json"),
        ("train --worker 2", "unknown option '--worker'", "perhaps --workers"),
        ("plan --device 4x8:H100", "unknown option '--device'", "perhaps --devices"),
        ("render slurm a.toml --node 1:2", "unknown option '--node'", "perhaps --nodes"),
        ("run --worker 2 loop.py", "unknown option '--worker'", "perhaps --workers"),
        ("run loop.py --worker 2", "unknown option '--worker'", "perhaps --workers"),
        ("run loop.py --lr 1 --worker=2", "unknown option '--worker'", "passed to loop.py"),
        ("run loop.py --lr 1 --profile steps=1..2", "--profile follows loop.py", "before loop.py"),
        ("run loop.py --lr 1 --workers 2", "--workers follows loop.py", "passed to loop.py"),
        ("launch --worker 2 loop.py", "unknown option '--worker'", "perhaps --workers"),
        ("train loop.py:main --worker 2", "unknown option '--worker'", "perhaps --workers"),
        ("trian", "invalid choice: 'trian'", "perhaps train"),
        ("loop.py", "invalid choice: 'loop.py'", "lockstep run loop.py"),
        ("checkpoint verfy runs/x", "invalid choice: 'verfy'", "perhaps verify"),
        ("run absent.py --worker 2", "there is no file absent.py", "give the path"),
    ],
)
def test_a_mistyped_word_names_the_nearest_one(
    words: str, what: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("loop.py").write_text(LOOP)
    assert main(words.split()) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert what in first and hint in last


@pytest.mark.parametrize(
    ("source", "option", "named"),
    [
        (LOOP, "--num-workers", True),
        ("def main(num_workers=1): ...", "--num-workers", True),
        ("class Options:\n    num_workers: int", "--num-workers", True),
        ('"""Usage: loop.py [--num-workers N]"""', "--num-workers", True),
        ('"""Trains with --workers 2."""', "--worker", False),
        ("def main(workers): ...", "--worker", False),
        ("lockstep.launch(main, workers=2)", "--workers", False),
        ("from lockstep import recipes", "--layout.shard", True),
    ],
)
def test_a_script_names_its_own_options(source: str, option: str, named: bool) -> None:
    assert names_option([ast.parse(source)], option, Path()) == named


@pytest.mark.parametrize(
    ("source", "may_define"),
    [
        ("from vendor.arguments import make", True),
        ("from transformers import HfArgumentParser", True),
        ("import fire", True),
        ("from argparse import ArgumentParser", False),
        ("from lockstep.units import parse_bytes", False),
        ("from torch.sparse import mm", False),
        ("from own import parse", False),
        ("from . import args", False),
    ],
)
def test_an_installed_package_may_define_the_options_of_a_script(
    source: str, may_define: bool
) -> None:
    Path("own.py").touch()
    assert imports_parser(ast.parse(source), Path()) == may_define


def test_a_launched_function_refuses_an_argument_before_the_workers_start() -> None:
    Path("own.py").write_text(
        "import lockstep\ndef main(lr: float = 0.1): ...\nlockstep.launch(main, workers=2)\n"
    )
    words = [sys.executable, "own.py", "--lr", "1", "--workers", "2"]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("UsageError: main takes no --workers\n")


def test_words_behind_two_dashes_are_not_compared() -> None:
    Path("loop.py").write_text(LOOP)
    for words in ("--num-workers 2", "--lr 0.1", "-- --worker 2", "-- --workers 2"):
        given = ["run", "loop.py", *words.split()]
        parser = options.build_parser()
        ours, script, arguments = split_script(parser, given)
        assert ours == ["run"] and script == "loop.py" and arguments
        if "--" not in given:
            refuse_mistyped(parser.commands["run"], arguments, script, "")


def test_the_help_shows_a_script_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert shown.index("lockstep run train.py") < shown.index("recipes/translate.toml")
    assert shown.index("\n    run ") < shown.index("\n    train ")
