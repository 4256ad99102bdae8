"""The command. It reads words, calls one function and turns an error into an exit code.

Rooms are imported where they are used, here and nowhere else: `lockstep --help` and a mistyped option answer before torch would be loaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import lockstep
from lockstep import log
from lockstep.errors import LockstepError, OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from lockstep.config.schema import ResolvedRun, RunConfig
    from lockstep.elastic.world import World
    from lockstep.runtime.worker_env import WorkerEnv

EXIT_CODES = """exit codes: 0 done; 1 training error; 2 usage or config; 3 data or checkpoint damaged; 4 diverged;
75 saved and wants to be started again (SIGTERM, SIGUSR1); 76 peers lost; 128+n ended by signal n (130: saved after SIGINT)"""

HERE = "127.0.0.1"
OVERRIDE = "change the schedule of a run as it goes on (optim.learning_rate, warmup_steps, decay, decay_steps); may be given several times"
RESTART = (
    "of a script: replace a lost worker in place (one), or restart all workers together as torchrun does (all); "
    "default: one for a script that imports lockstep"
)


class Parser(argparse.ArgumentParser):
    """argparse with our own errors."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message, "command line", f"see {self.prog} --help")


def whole(least: int, most: int) -> Callable[[str], int]:
    """For argparse: a whole number within these bounds."""

    def read(text: str) -> int:
        if len(text) <= 20 and text.removeprefix("-").isdecimal() and least <= (number := int(text)) <= most:
            return number
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from {least} to {most:,}")

    return read


def parser() -> Parser:
    """All commands and their options."""
    top = Parser(prog="lockstep", description="Train PyTorch models on many devices and machines.", epilog=EXIT_CODES, allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print the version and end")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Callable[[argparse.Namespace, list[str]], int], help: str, *, of_a_run: bool = False) -> Callable[..., Any]:
        one: Parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False, epilog=EXIT_CODES)
        one.set_defaults(run=run)
        if of_a_run:
            one.formatter_class = argparse.RawDescriptionHelpFormatter
            what = "a run file, or a function of yours (default: the embedded run)"
            one.add_argument("what", nargs="?", metavar="RUN.toml|FILE.py:FUNCTION", help=what)
        return one.add_argument

    workers, seed, checkpoint_step = whole(1, 1 << 16), whole(0, 2**63 - 1), whole(0, 10**9)
    resume = {"default": "auto", "metavar": "auto|never|required|STEP", "help": "which checkpoint to go on from (default: auto)"}
    override = {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": OVERRIDE}
    restart = {"choices": ["one", "all"], "help": RESTART}
    beams = {"type": whole(1, 256), "default": 1, "help": "1: greedy; more: beam search of that width"}
    average = {"type": whole(0, 10_000), "default": 0, "metavar": "N"}

    add = command("train", train, "train a run, or a function of your own, on every device of this machine", of_a_run=True)
    add("--out", type=Path, help="folder of the run (default: runs/NAME of the run file, runs/default)")
    add("--workers", type=workers, help="processes on this machine (default: one for each GPU, two on a CPU)")
    add("--resume", **resume)
    add("--override", **override)
    add("--profile", default="", metavar="steps=A..B", help="write a trace of these steps, and where their time went")
    add("--show", action="store_true", help="print every value and where it came from, and end")

    add = command("run", run_script, "run a script of your own on every device of this machine; its arguments follow FILE.py")
    add("file", metavar="FILE.py", help="the script, run by every worker as python FILE.py ARGUMENTS would")
    add("--out", type=Path, help="folder of the run (default: --out of the script's arguments, the one of its Session, or runs/FILE)")
    add("--workers", type=workers, help="processes on this machine (default: one for each GPU, two on a CPU)")
    add("--restart", **restart)

    add = command("launch", launch, "train on several hosts, or on this one, and go on whatever dies", of_a_run=True)
    add("--out", type=Path, help="folder of the run, on a disk that all hosts share (default: as for train)")
    add("--workers", type=workers, help="processes on this host, when it is the only one (default: as for train)")
    add("--hosts", type=Path, metavar="HOSTS.toml", help="all hosts of the run; start the same command on each")
    add("--host", metavar="NAME", help="which of them this is (default: what this machine calls itself)")
    add("--ssh", action="store_true", help="start the command on all hosts from here, by ssh")
    help = "workers below which training waits for more (default: 1; of a script with --restart all: all of them)"
    add("--min", type=whole(0, 1 << 16), help=help)
    add("--max", type=whole(0, 1 << 16), help="workers that train at once, others stand by (default: batch.micro_batches)")
    add("--resume", **resume)
    add("--override", **override)
    add("--restart", **restart)
    add("--with-evaluator", action="store_true", help="score every checkpoint in a process of its own on this host, by ssh on the first")
    add("--stop", type=Path, metavar="RUN", help="ask the run in this folder to save and stop, from any host; starts nothing")

    add = command("status", status, "list who is in a run: generation, members, hosts, process ids, roles and steps")
    add("folder", type=Path, metavar="RUN", help="folder of the run")
    add("--json", action="store_true", help="for programs")

    help = "train several times, with random faults or on other numbers of workers, and compare the hashes"
    add = command("drill", drill, help, of_a_run=True)
    add("--workers", type=workers, help="processes on this machine (default: 3, or what the layout takes; self-check: 2)")
    faults = "how many (default: 7, one of each kind); a function without --faults: a self-check with 1 and N workers"
    add("--faults", type=whole(1, 10_000), help=faults)
    add("--seed", type=seed, default=1, help="of the faults (default: 1)")
    add("--out", type=Path, help="a new folder (default: runs/drill)")

    add = command("evaluate", evaluate, "score the checkpoints of a run on its held-out text")
    add("folder", type=Path, metavar="RUN", help="folder of the run")
    add("--step", type=checkpoint_step, help="the checkpoint to score (default: the newest)")
    add("--follow", action="store_true", help="wait for new checkpoints until the run is finished")
    add("--split", choices=["validation", "test"], default="validation", help="which held-out text (default: validation)")
    add("--beams", **beams)
    add("--average", help="score the mean of the newest N checkpoints' weights", **average)
    add("--workers", type=workers, help="processes that share the work (default: 1); any number gives the same answer")

    add = command("translate", translate, "translate a text, or lines from standard input")
    add("folder", type=Path, metavar="RUN", help="folder of the run")
    add("text", nargs="*", help="what to translate; nothing: lines from standard input")
    add("--step", type=checkpoint_step, help="the checkpoint to use (default: the newest)")
    add("--beams", **beams)
    add("--average", help="use the mean of the newest N checkpoints' weights", **average)
    add("--compile", action="store_true", help="compile the decoder; pays off for long files")

    add = command("generate", generate, "continue a text, or lines from standard input, by a Llama")
    add("folder", type=Path, metavar="RUN|HF-FOLDER", help="folder of a run, or of a Hugging Face model")
    add("text", nargs="*", help="what to continue; nothing: lines from standard input")
    add("--tokens", type=whole(1, 1 << 20), default=128, help="how many at most (default: 128)")
    add("--temperature", type=float, default=0.0, help="0: the most probable token; higher: more varied (default: 0)")
    add("--top-k", type=whole(0, 1 << 20), default=0, help="draw from the K most probable tokens only (default: 0, from all)")
    add("--top-p", type=float, default=1.0, help="draw from the most probable tokens of this total probability (default: 1)")
    add("--seed", type=seed, default=0, help="of the draws (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--chat", action="store_true", help="the text is what a user says: answer it, by the model's chat template")
    add("--step", type=checkpoint_step, help="the checkpoint of a run to use (default: the newest)")
    add("--compile", action="store_true", help="compile the decoding step; pays off for long continuations")
    add("--tensor", type=workers, default=1, metavar="T", help="cut the model over T processes of this machine (default: 1)")
    add("--file", type=Path, help="lines to continue, instead of standard input")

    add = command("checkpoint", checkpoint, "list, verify, digest, import or export the checkpoints of a run")
    add("action", choices=["list", "verify", "digest", "import", "export"])
    add("folder", type=Path, metavar="RUN", help="folder of the run; import: a Hugging Face folder")
    add("step", nargs="?", type=checkpoint_step, help="digest, export: the checkpoint (default: the newest)")
    add("--out", type=Path, help="export: the .safetensors file (of a Llama: the folder) to write; import: the run's folder")
    add("--shard-bytes", metavar="SIZE", help="export of a Llama: most bytes in one file (default: 5 GB)")
    dtypes = "export of a Llama: of its numbers (default: as in the model it began with)"
    add("--dtype", choices=["float32", "bfloat16", "float16"], help=dtypes)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        refuse_half_characters(words)
        top = parser()
        values: list[str] = []
        words, script, arguments = split_script(top, words)
        if words[:1] in (["train"], ["launch"], ["drill"]):
            of_a_run = options_of(top, words[0])
            if not script and {"--help", "-h"} & set(words):
                print_help_of_a_run(of_a_run)
                return 0
            if not script:
                words, values = take_values(words, of_a_run._option_string_actions)
        args, rest = top.parse_known_args([*words, script] if script else words)
        rest += [*values, *arguments]
        if args.version:
            print(lockstep.__version__)
            return 0
        if not args.command:
            top.print_help()
            return 2
        log.set_up_logging()
        from lockstep.config.resolve import refuse_unknown_variables
        from lockstep.runtime.environment import RESERVED_VARIABLES

        refuse_unknown_variables(os.environ, RESERVED_VARIABLES)
        return int(args.run(args, rest))
    except LockstepError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        refused = UsageError(f"{error.filename}: {error.strerror}", f"lockstep {words[0]}", "give a path that this user can read and write")
        print(refused, file=sys.stderr)
        return refused.exit_code
    except (RuntimeError, MemoryError) as error:
        from lockstep.runtime.exit_report import error_summary, is_out_of_memory

        if not is_out_of_memory(error):
            raise
        lacking = OutOfMemoryError(
            f"no memory left: {error_summary(error)}", f"lockstep {words[0]}", "give shorter texts, or fewer at a time"
        )
        print(lacking, file=sys.stderr)
        return lacking.exit_code


def options_of(top: Parser, command: str) -> Parser:
    """The parser of a command."""
    found: Parser = top._subparsers._group_actions[0].choices[command]  # type: ignore[union-attr, index]
    return found


def split_script(top: Parser, words: list[str]) -> tuple[list[str], str, list[str]]:
    """(our words, FILE.py, its arguments) of `run` and `launch`; FILE.py is "" for everything else."""
    if words[:1] not in (["run"], ["launch"]):
        return words, "", []
    from lockstep.cli.script import split_at_script

    options = options_of(top, words[0])._option_string_actions
    ours, script, arguments = split_at_script(words[1:], {name: 0 if one.nargs == 0 else 1 for name, one in options.items()})
    return [words[0], *ours], script, arguments


def refuse_half_characters(words: Sequence[str]) -> None:
    """UsageError for words that are not UTF-8: neither a checkpoint's JSON nor a tokenizer nor another host could be given them."""
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            what = f"{word!r} is not valid UTF-8"
            raise UsageError(what, "command line", "rename the file, or convert the text: iconv -f latin1 -t utf-8")


def take_values(words: list[str], options: Container[str]) -> tuple[list[str], list[str]]:
    """(words for argparse, the `--section.key value` pairs): argparse takes the value of an option it does not know for the run file."""
    ours: list[str] = []
    values: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("--") or word.partition("=")[0] in options:
            ours.append(word)
        else:
            values += [word] if "=" in word else [word, *[value for value in [next(rest, None)] if value is not None]]
    return ours, values


def print_help_of_a_run(of_a_run: Parser) -> None:
    """The options of train, launch or drill and every key of a run, from the schema itself."""
    from lockstep.config.schema import config_fields

    keys = config_fields()
    width = max(map(len, keys)) + 2
    lines = [f"  --{one.key:<{width}} {one.doc} (default: {one.default!r})" for one in keys.values()]
    of_a_run.epilog = (
        "values of the run, as --section.key VALUE, in the run file, or as LOCKSTEP_SECTION_KEY:\n" + "\n".join(lines) + "\n\n" + EXIT_CODES
    )
    of_a_run.print_help()


def refuse(rest: list[str], command: str) -> None:
    """UsageError for words that the command does not know."""
    if rest:
        raise UsageError(f"unknown option {rest[0]!r}", "command line", f"see lockstep {command} --help")


@dataclass(frozen=True)
class Asked:
    """The run that the words of `train` and `launch` ask for.

    script  the user's FILE.py:FUNCTION, or FILE.py of `lockstep run`; "": a run of ours
    file    the run file, if one was given
    values  the words --section.key VALUE, --name VALUE for a function, or a script's arguments, and `flags` what they say
    overrides  the KEY=VALUE words of --override
    profile which steps to look at closely, as `profile.Steps` reads it; "": none
    restart what a lost worker of a script means: "one" or "all" restart
    """

    script: str
    file: Path | None
    folder: Path
    resume: str
    values: list[str]
    flags: dict[str, str]
    overrides: tuple[str, ...] = ()
    profile: str = ""
    restart: str = "one"

    def open(self, resume: str) -> ResolvedRun:
        """The run; its new overrides hold from the checkpoint on that `resume` names. UsageError when something does not fit."""
        from lockstep.cli.run_options import open_run
        from lockstep.config.rules import parse_overrides
        from lockstep.config.schema import ScheduleOverride

        override = ScheduleOverride(self.first(resume), parse_overrides(self.overrides)) if self.overrides else None
        return open_run(self.folder, self.file, self.flags, os.environ, override, rewind=resume.isdecimal())

    def first(self, resume: str) -> int:
        """The step of the checkpoint that `resume` names. UsageError, CheckpointError when there is none."""
        from lockstep.checkpoint.folder import committed_steps
        from lockstep.checkpoint.policy import choose_resume_step

        return choose_resume_step(resume, committed_steps(self.folder / "checkpoints"))[0] or 0

    def words(self, resume: str) -> tuple[str, ...]:
        """`lockstep` with these words does it."""
        if self.is_file:
            return "run", "--restart", self.restart, "--out", str(self.folder), self.script, "--", *self.values
        what = [self.script] if self.script else [str(self.file)] if self.file else []
        what += ["--profile", self.profile] if self.profile else []
        what += [f"--override={word}" for word in self.overrides]
        return "train", *what, "--out", str(self.folder), "--resume", resume, *self.values

    @property
    def is_file(self) -> bool:
        """Whether each worker runs a whole script."""
        return self.script.endswith(".py")

    def live(self) -> int:
        """The life of a worker; its exit code."""
        from lockstep.runtime.worker_env import read_worker_env

        if self.is_file and self.restart == "all" and (seat := read_worker_env(os.environ)):
            from lockstep.cli.restart_all import supervise

            return supervise(Path(self.script), self.values, seat)
        if self.is_file:
            from lockstep.cli.script import run_file

            return run_file(Path(self.script), self.values)
        if self.script:
            return own_function(self.script, self.folder, self.flags)
        try:
            return work(self)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:  # no repetition mends it
            hint = "move aside what is there, or give another folder with --out"
            raise UsageError(f"{error.filename}: {error.strerror}", f"the run folder {self.folder}", hint) from error


def read_asked(args: argparse.Namespace, rest: list[str]) -> Asked:
    """What is asked for."""
    from lockstep.config.resolve import parse_flags

    script = args.what if is_script(args.what) else ""
    file = Path(args.what) if args.what and not script else None
    folder = args.out or Path("runs") / (file.stem if file else "default")
    if script:
        refuse_for_own_loop(args, script)
    if script.endswith(".py"):
        return read_script_asked(args, script, rest)
    return Asked(script, file, folder, args.resume, rest, parse_flags(rest), tuple(args.override), getattr(args, "profile", ""))


def read_script_asked(args: argparse.Namespace, name: str, arguments: list[str]) -> Asked:
    """What `run` and `launch` ask for with a script. UsageError when it cannot be read, or no script is run by this command."""
    from lockstep.cli.script import folder_of, imports_lockstep, read_script

    if args.command not in ("run", "launch"):
        hint = f"write FILE.py:FUNCTION, such as examples/own_loop.py:main; a whole script: lockstep run {name}"
        raise UsageError(f"{name!r} names no function", "command line", hint)
    file = Path(name)
    script = read_script(file)
    folder, heals = folder_of(file, script, args.out, arguments), imports_lockstep(script)
    restart = args.restart or ("one" if heals else "all")
    return Asked(name, None, folder, "auto", arguments, {"arguments": shlex.join(arguments)}, restart=restart)


def run_script(args: argparse.Namespace, rest: list[str]) -> int:
    """Start the workers of this machine, each with the script, or be one of them when the environment says so."""
    from lockstep.runtime.environment import read_rank_info
    from lockstep.runtime.subprocesses import worker_main
    from lockstep.runtime.worker_env import read_worker_env

    if not args.file.endswith(".py"):
        raise UsageError(f"{args.file!r} is no script", "command line", "write lockstep run FILE.py; a run file: lockstep train RUN.toml")
    asked = read_script_asked(args, args.file, rest)
    if seat := read_worker_env(os.environ):
        return sit(asked, seat)
    place, found = read_rank_info(os.environ)
    if place is not None:
        refuse_other_workers(args.workers, place.size, found)
        return worker_main(asked.live)
    workers, _ = count_workers(args.workers, None)
    least = workers if asked.restart == "all" else 1
    return look_after(asked, None, socket.gethostname(), HERE, workers, expected=workers, least=least, most=workers, lives_on=False)


def is_script(what: str | None) -> bool:
    """Whether this names a user's function, FILE.py:FUNCTION."""
    return bool(what) and (":" in str(what) or str(what).endswith(".py"))


def refuse_for_own_loop(args: argparse.Namespace, script: str) -> None:
    """UsageError for an option that a user's own loop would never hear of."""
    said = vars(args)
    meant = {
        "--resume": (said["resume"] != "auto", "its own keeper.resume(...) says which checkpoint it goes on from"),
        "--override": (bool(said["override"]), "its function sets the learning rate"),
        "--profile": (bool(said.get("profile")), "use torch.profiler in the loop"),
        "--show": (bool(said.get("show")), "its values are the arguments of its function"),
        "--with-evaluator": (bool(said.get("with_evaluator")), "evaluate in the loop: Lockstep does not know its model"),
    }
    for option, (given, hint) in meant.items():
        if given:
            raise UsageError(f"{option} is for a run file, and {script} is a loop of your own", "command line", hint)


def check(asked: Asked) -> RunConfig | None:
    """What does not fit is refused here, before a process starts; the run, None for a function."""
    from lockstep.config.rules import refuse_missing_packages

    if asked.script:
        return None
    resolved = asked.open(asked.resume)
    refuse_missing_packages(resolved, prepared=(asked.folder / "data" / "prepared.json").exists())
    asked.first(asked.resume)
    return resolved.run


def train(args: argparse.Namespace, rest: list[str]) -> int:
    """Start the workers of this machine, or be one of them when the environment says so."""
    from lockstep.config.saved_run import format_run
    from lockstep.runtime.environment import read_rank_info
    from lockstep.runtime.subprocesses import worker_main
    from lockstep.runtime.worker_env import read_worker_env

    asked = read_asked(args, rest)
    if seat := read_worker_env(os.environ):
        return sit(asked, seat)
    if args.show and not asked.script:
        print(format_run(asked.open(asked.resume)))
        return 0
    place, found = read_rank_info(os.environ)
    run = check(asked)
    if place is not None:
        refuse_other_workers(args.workers, place.size, found)
        return worker_main(asked.live)
    workers, reason = count_workers(args.workers, run)
    refuse_layout(run, workers, reason)
    unit, most = room(run, workers)
    return look_after(asked, run, socket.gethostname(), HERE, workers, expected=workers, least=unit, most=most, lives_on=False)


def refuse_other_workers(asked: int | None, there: int, found: str) -> None:
    """UsageError when a process that was started as one of `there` workers is asked for another number of them."""
    if asked not in (None, there):
        raise UsageError(f"--workers {asked}, but {found}", "command line and environment", "leave --workers out, or start that many")


def launch(args: argparse.Namespace, rest: list[str]) -> int:
    """Be the agent of this host, or start the agents of all hosts."""
    from lockstep.agent.hosts import parse_hosts, read_hosts, run_on_all_hosts, ssh_command
    from lockstep.runtime.worker_env import ONE_SCREEN

    if args.stop:
        from lockstep.elastic.control import stop_run

        alone = vars(parser().parse_args(["launch", "--stop", str(args.stop)]))
        given = [name for name, value in vars(args).items() if value != alone[name]]
        words = [args.what if name == "what" else f"--{name.replace('_', '-')}" for name in given]
        if unwanted := [*words, *rest]:
            raise UsageError(f"{unwanted[0]} beside --stop", "command line", "give --stop the run's folder, and nothing else")
        print(stop_run(args.stop))
        return 0
    if args.ssh and args.host:
        hint = "leave one out: --ssh starts all hosts, --host says which of them this is"
        raise UsageError(f"--ssh and --host {args.host}", "command line", hint)
    asked = read_asked(args, rest)
    if args.restart and not asked.is_file:
        raise UsageError(f"--restart {args.restart} without a script", "command line", "it is for lockstep launch FILE.py")
    run = check(asked)
    name, source = (args.host, "--host") if args.host else (socket.gethostname(), "what this machine calls itself")
    if args.hosts is None:
        if args.ssh:
            raise UsageError("--ssh starts nothing without hosts", "command line", "give --hosts HOSTS.toml")
        workers, reason = count_workers(args.workers, run)
        hint = "give 1 worker or more, and a name of letters, digits, dots, dashes and underscores"
        hosts = parse_hosts({"host": [{"name": name, "address": HERE, "workers": workers}]}, f"{source}; {reason}", hint)
    elif args.workers is not None:
        raise UsageError(f"--workers {args.workers} beside --hosts {args.hosts}", "command line", "leave one out: the file says how many")
    else:
        hosts = read_hosts(args.hosts)
    if args.min is None:
        args.min = hosts.workers if asked.is_file and asked.restart == "all" else 1
    most = refuse_bounds(args, run, hosts.workers)
    if (args.ssh or hosts.ssh) and not args.host:
        layout_limits = ["--min", str(args.min), *(["--max", str(args.max)] if args.max is not None else [])]
        command = [sys.executable, "-m", "lockstep", "launch", "--hosts", str(args.hosts), *layout_limits]
        more = {hosts.host[0].name: ["--with-evaluator"]} if args.with_evaluator else {}
        asked_words = asked.words(asked.resume)[1:]
        each = [(host, [*command, *more.get(host.name, []), "--host", host.name, *asked_words]) for host in hosts.host]
        return run_on_all_hosts([ssh_command(host, command, Path.cwd(), {**os.environ, ONE_SCREEN: "1"}) for host, command in each])
    host = hosts.find(name, f"{source}; {args.hosts}")
    return look_after(
        asked,
        run,
        name,
        host.resolve(),
        host.workers,
        expected=hosts.workers,
        least=max(args.min, room(run, 1)[0]),
        most=most,
        lives_on=True,
        evaluator=args.with_evaluator,
    )


def refuse_bounds(args: argparse.Namespace, run: RunConfig | None, workers: int) -> int:
    """How many of `workers` train at once. UsageError when --min and --max cannot be, or the run could never begin."""
    _, room_for = room(run, args.max or workers)
    refuse_layout(run, min(workers, room_for), str(args.hosts or "--workers"))  # who is more than that stands by
    most: int = args.max if args.max is not None else room_for
    if not 1 <= args.min <= most <= room_for:
        what = f"at least {args.min} and at most {most} workers, where a step has work for {room_for}"
        raise UsageError(what, "--min, --max; batch.micro_batches", f"give 1 <= --min <= --max <= {room_for}")
    if args.min > workers:
        what = f"training begins with {args.min} workers, and there will be {workers}"
        raise UsageError(what, f"--min; {args.hosts or '--workers'}", f"give --min {workers} or less, or more workers")
    return most


def room(run: RunConfig | None, workers: int) -> tuple[int, int]:
    """(workers of a replica, workers for which a step has work); of a user's function nothing is known, so `workers`."""
    if run is None:
        return 1, workers
    unit = run.layout.shard * run.layout.tensor * run.layout.pipeline
    return unit, run.batch.micro_batches // run.layout.shard * unit


def refuse_layout(run: RunConfig | None, workers: int, where: str) -> None:
    """UsageError when so many workers cannot be laid out as the run wants, with the nearest layouts that work."""
    if run is None:
        return
    from lockstep.layout import Layout, choose_layout
    from lockstep.tasks.layout_limits import layout_limits

    asked = Layout(run.layout.replicate, run.layout.shard, run.layout.tensor, run.layout.pipeline)
    if asked.workers_per_replica == 1 and not 1 <= workers <= run.batch.micro_batches:
        most = run.batch.micro_batches
        what = f"{workers} workers for a step of {most} micro-batches"
        raise UsageError(what, f"{where}; batch.micro_batches", f"give 1 to {most} workers, or more micro-batches")
    choose_layout(asked, workers, layout_limits(run), f"{where}; [layout] of the run")


def count_workers(given: int | None, run: RunConfig | None) -> tuple[int, str]:
    """(workers of this machine, the reason), which is told unless they were given."""
    from lockstep.runtime.subprocesses import default_worker_count

    if given is not None:
        return given, "--workers"
    workers, reason = default_worker_count()
    unit, _ = room(run, workers)
    if run and (unit > 1 or run.layout.replicate):
        workers, reason = unit * (run.layout.replicate or max(1, workers // unit)), "as many as the layout takes"
    logging.getLogger("lockstep").info("%s: %s", f"{workers} workers" if workers > 1 else "1 worker", reason)
    return workers, reason


def look_after(
    asked: Asked,
    run: RunConfig | None,
    host: str,
    address: str,
    workers: int,
    *,
    expected: int,
    least: int,
    most: int,
    lives_on: bool,
    evaluator: bool = False,
) -> int:
    """Be the agent of this machine's workers; the exit code of the run."""
    from lockstep.agent.agent import AgentConfig, run_agent
    from lockstep.agent.forkserver import WorkerProgram
    from lockstep.config.rules import shared_values
    from lockstep.runtime.subprocesses import check_worker_count

    check_worker_count(workers, host)
    # What is chosen once, at the start, is no part of what was asked for.
    values = {key: text for key, text in shared_values(run).items() if key != "compute.precision"} if run else asked.flags
    command = {"script": asked.script} | {f"--{key}": text for key, text in values.items()}
    # A worker that comes after another one goes on from where the run is by then, whatever the first was told.
    work = WorkerProgram(asked.words(asked.resume), asked.words("auto"), script="" if asked.is_file else asked.script)
    config = AgentConfig(
        host=host,
        address=address,
        slots=workers,
        expected_workers=expected,
        min_workers=least,
        max_workers=most,
        lives_on=lives_on,
        flags=asked.flags if asked.script else {},
        command=command,
        environ=os.environ,
        evaluator=evaluator,
    )
    return run_agent(work, asked.folder, config)


def work(asked: Asked) -> int:
    """The life of a worker; its exit code."""
    from lockstep.config.saved_run import from_json, to_json
    from lockstep.elastic.consensus import run_on_rank0
    from lockstep.elastic.protocol.decisions import ElasticLimits
    from lockstep.elastic.world import World
    from lockstep.runtime.signals import stop_exit_code
    from lockstep.tasks.evaluate import evaluate_at_end
    from lockstep.train import train as train_run
    from lockstep.training.profiler import ProfiledSteps
    from lockstep.training.setup import lock_run_folder, resolve_precision

    folder, here = asked.folder, asked.open(asked.resume)
    elastic = here.run.elastic
    limits = ElasticLimits(
        heartbeat_timeout_s=elastic.heartbeat_timeout_s,
        rendezvous_timeout_s=elastic.rendezvous_timeout_s,
        hang_timeout_s=elastic.hang_timeout_s,
        evaluate_timeout_s=elastic.evaluate_timeout_s,
        on_hang=elastic.on_hang,
        replica_size=room(here.run, 1)[0],
    )
    with (
        World.join(threads=here.run.compute.num_threads, timeout_s=here.run.parallel.timeout_s, limits=limits) as world,
        ExitStack() as held,
    ):
        log.set_up_logging(rank=world.slot_or_rank, file=log_file(folder, world.host, world.slot_or_rank, make=world.membership is None))
        resolved = from_json(run_on_rank0(world, lambda: to_json(resolve_precision(asked.open(asked.resume), world.device))))
        if not world.is_joining:
            run_on_rank0(world, lambda: held.enter_context(lock_run_folder(folder, resolved, alone=world.membership is None)))
        outcome = train_run(
            resolved, folder, world, resume=asked.resume, profile=ProfiledSteps.parse(asked.profile) if asked.profile else None
        )
        if not outcome.stopped_by:
            with world.during("evaluating"):
                world.retry_across_generations(lambda: evaluate_at_end(folder, resolved.run, world))
        if world.membership is None:
            world.report_goodput(folder)
        world.exit_code = stop_exit_code(outcome.stopped_by)
        return world.exit_code


def sit(asked: Asked, seat: WorkerEnv) -> int:
    """The life of a worker that an agent started; its exit code. That it was to leave, or that the run has ended, is no failure."""
    from lockstep.elastic.membership import RunEnded
    from lockstep.elastic.run_folder import folder_error, may_be_folder_error, wait_until_usable
    from lockstep.errors import RunFolderUnavailableError
    from lockstep.runtime.signals import Stopped
    from lockstep.runtime.status_board import read_status
    from lockstep.runtime.subprocesses import worker_main
    from lockstep.training.replica_group import HostDrained

    told: dict[str, bool] = {}

    def life() -> int:
        wait_until_usable(seat)
        try:
            return asked.live()
        except HostDrained:
            told["drained"] = True
            return 0
        except Stopped as stopped:
            return int(str(stopped))
        except RunEnded as ended:
            return ended.exit_code
        except Exception as error:
            if may_be_folder_error(error) and (why := folder_error(seat)):
                what, where = f"the run folder cannot be used: {why}", f"met as {type(error).__name__}: {error}"
                raise RunFolderUnavailableError(what, where, "mount it again; a new worker waits for it") from error
            raise

    def about() -> dict[str, int | bool]:
        try:
            return {"step": max(-1, read_status(Path(seat.state) / f"{seat.slot}.board").step - 1), **told}
        except OSError:
            return {**told}

    return worker_main(life, about)


def status(args: argparse.Namespace, rest: list[str]) -> int:
    """Who is in a run, and what each does."""
    refuse(rest, "status")
    from lockstep.elastic import control

    found = control.run_status(args.folder)
    print(json.dumps(found, indent=1) if args.json else control.format_status(found))
    return 0


def drill(args: argparse.Namespace, rest: list[str]) -> int:
    """Train several times, with faults, and compare the hashes."""
    from lockstep.cli import drill as drills
    from lockstep.config.resolve import parse_flags, resolve

    folder, host, flags = args.out or Path("runs") / "drill", socket.gethostname(), parse_flags(rest)
    with drills.ending_on_sigterm():
        if is_script(args.what) and args.faults is None:
            workers = 2 if args.workers is None else args.workers
            return drills.self_check([args.what, *rest], folder, workers=workers, host=host)
        faults = len(drills.FAULTS) if args.faults is None else args.faults
        if is_script(args.what):
            workers = 3 if args.workers is None else args.workers
            return drills.drill([args.what, *rest], folder, workers=workers, faults=faults, seed=args.seed, steps=None, host=host)
        file = Path(args.what) if args.what else None
        run = resolve(file, flags, os.environ).run
        unit, _ = room(run, 3)
        workers = args.workers if args.workers is not None else unit * (run.layout.replicate or 3)
        refuse_layout(run, workers, "--workers")
        words, steps = [*([str(file)] if file else []), *rest], (run.steps, run.checkpoint.every_steps)
        return drills.drill(words, folder, workers=workers, faults=faults, seed=args.seed, steps=steps, host=host)


def log_file(folder: Path, node: str, rank: int, *, make: bool) -> Path:
    """Where a worker's log goes. `make`: its folder, too."""
    if make:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    return folder / "logs" / f"{node}-{rank}.log"


def own_function(spelled: str, folder: Path, flags: dict[str, str]) -> int:
    """Call a user's function in a worker: flags are its keyword arguments, checked against its annotations."""
    from lockstep.cli.script import arguments_of
    from lockstep.runtime.numerics import seed_unseeded_generators
    from lockstep.runtime.user_function import load_function

    function = load_function(spelled)
    seed_unseeded_generators()  # before the function makes its data and its model
    function(**arguments_of(function, spelled, flags, folder))
    return 0


def evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    """Score checkpoints, in one process or several."""
    refuse(rest, "evaluate")
    from lockstep.runtime.environment import read_rank_info
    from lockstep.runtime.subprocesses import launch, worker_main

    place, found = read_rank_info(os.environ)
    if place is None:
        command = [sys.executable, "-m", "lockstep", "evaluate", *sys.argv[2:]]
        return launch(command, args.workers or 1, run_folder=None, port=None, environ=os.environ)
    refuse_other_workers(args.workers, place.size, found)
    return worker_main(lambda: evaluate_here(args))


def evaluate_here(args: argparse.Namespace) -> int:
    """The life of an evaluating worker."""
    from lockstep.elastic.world import World
    from lockstep.runtime.signals import stop_exit_code
    from lockstep.tasks.evaluate import evaluate as evaluate_run

    with World.join(threads=1) as world:
        log.set_up_logging(rank=world.rank)
        asked = {"step": args.step, "split": args.split, "beams": args.beams, "average": args.average, "follow": args.follow}
        return stop_exit_code(evaluate_run(args.folder, world, **asked))


def translate(args: argparse.Namespace, rest: list[str]) -> int:
    """Print translations, and nothing else, on standard output."""
    refuse(rest, "translate")
    from lockstep.data.pairs.textfiles import read_input_lines
    from lockstep.generation.beam_search import translate as translate_texts
    from lockstep.models.load_translator import load_translator

    loaded = load_translator(args.folder, step=args.step, average=args.average)
    texts = args.text or read_input_lines(None)
    for line in translate_texts(loaded.model, loaded.tokenizer, texts, beams=args.beams, compile=args.compile):
        print(line)
    return 0


def generate(args: argparse.Namespace, rest: list[str]) -> int:
    """Print continuations, and nothing else, on standard output: that of one text as it comes, else a JSON string a line."""
    refuse([word for word in rest if word.startswith("-")], "generate")
    args.text += rest  # argparse leaves texts behind an option over
    from lockstep.runtime.environment import read_rank_info
    from lockstep.runtime.subprocesses import launch, worker_main

    if args.tensor != 1 and args.compile:
        raise UsageError(f"--compile is not supported with --tensor {args.tensor}", "command line", "leave one of them out")
    if args.tensor == 1:
        return generate_here(args)
    if read_rank_info(os.environ)[0] is not None:
        return worker_main(lambda: generate_together(args))
    with TemporaryDirectory(prefix="lockstep-generate-") as folder:
        command = [sys.executable, "-m", "lockstep", "generate", *sys.argv[2:]]
        if not args.text and not args.file:  # the workers have no standard input
            lines = Path(folder) / "lines"
            lines.write_bytes(sys.stdin.buffer.read())
            command += ["--file", str(lines)]
        return launch(command, args.tensor, run_folder=None, port=None, environ=os.environ)


def generate_together(args: argparse.Namespace) -> int:
    """The life of one of the processes that a model is cut over."""
    from lockstep.elastic.world import World

    with World.join(threads=1) as world:
        log.set_up_logging(rank=world.rank)
        return generate_here(args, world)


def generate_here(args: argparse.Namespace, world: World | None = None) -> int:
    """Continue the texts in this process, or Collective with the others in the world; the first one prints."""
    from lockstep.data.pairs.textfiles import read_input_lines
    from lockstep.data.text.chat_tokenizer import ChatTokenizer
    from lockstep.generation.sampling import SamplingParams, check_sampling
    from lockstep.generation.sampling import generate as generate_texts
    from lockstep.generation.tensor_parallel import apply_tensor_parallel
    from lockstep.models.llama_io import load_llama

    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    check_sampling(args.tokens, sampling)
    loaded = load_llama(args.folder, args.step, device=world.device if world else None)
    group = apply_tensor_parallel(loaded.model, world, "--tensor") if world else None
    tokenizer = ChatTokenizer.load(loaded.tokenizer, loaded.hf_config)
    texts = args.text or read_input_lines(args.file)
    options = {"tokens": args.tokens, "sampling": sampling, "stops": args.stop, "chat": args.chat, "compile": args.compile, "group": group}
    found, leads = ["" for _ in texts], world is None or world.leader
    for row, text in generate_texts(loaded.model, tokenizer, texts, **options):
        found[row] += text
        if len(args.text) == 1 and leads:
            print(text, end="", flush=True)
    for one in found if leads else []:
        print("" if len(args.text) == 1 else json.dumps(one, ensure_ascii=False))
    return 0


def checkpoint(args: argparse.Namespace, rest: list[str]) -> int:
    """List, verify, digest, import, export."""
    refuse(rest, "checkpoint")
    from lockstep.checkpoint import commands

    if args.action == "import" or (args.action == "export" and (args.folder / "model.json").is_file()):
        return carry(args)
    if args.action == "list":
        print(commands.list_table(args.folder))
    elif args.action == "digest":
        print(commands.digest_line(args.folder, args.step))
    elif args.action == "export":
        print(commands.export(args.folder, args.step, args.out or args.folder / "model.safetensors"))
    else:
        whole, lines = commands.verify(args.folder)
        print("\n".join(lines))
        return 0 if whole else 3
    return 0


def carry(args: argparse.Namespace) -> int:
    """A Llama from a Hugging Face folder into a run's, or back."""
    from lockstep.models.hub import SHARD_BYTES
    from lockstep.models.llama_io import export_run, import_hub
    from lockstep.units import parse_bytes

    if args.out is None:
        raise UsageError(f"checkpoint {args.action} needs a folder to write", "command line", "name a new one with --out")
    if args.action == "import":
        print(import_hub(args.folder, args.out))
    else:
        try:
            shard_bytes = parse_bytes(args.shard_bytes) if args.shard_bytes else SHARD_BYTES
        except ValueError as error:
            raise UsageError(f"--shard-bytes: {error}", "command line", "give a size such as 5 GB") from None
        print(export_run(args.folder, args.step, args.out, shard_bytes, args.dtype or ""))
    return 0
