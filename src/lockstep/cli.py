"""The command. It reads words, calls one function and turns an error into an exit code.

Rooms are imported where they are used, here and nowhere else: `lockstep --help` and a mistyped option answer before torch would be loaded.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from lockstep import log
from lockstep.errors import LockstepError, UsageError

EXIT_CODES = """exit codes: 0 done; 1 training error; 2 usage or config; 3 data or checkpoint damaged; 4 diverged;
75 saved and wants to be started again (SIGTERM, SIGUSR1); 76 peers lost; 128+n ended by signal n (130: saved after SIGINT)"""


class Parser(argparse.ArgumentParser):
    """argparse with our own errors."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message, "command line", f"see {self.prog} --help")


def parser() -> Parser:
    """All commands and their options."""
    top = Parser(prog="lockstep", description="Train PyTorch models on many devices and machines.", epilog=EXIT_CODES, allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print the version and end")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Callable[[argparse.Namespace, list[str]], int], help: str) -> Parser:
        one: Parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False, epilog=EXIT_CODES)
        one.set_defaults(run=run)
        return one

    one = command("train", train, "train a run, or a function of your own, on every device of this machine")
    one.formatter_class = argparse.RawDescriptionHelpFormatter
    one.add_argument(
        "what", nargs="?", metavar="RUN.toml|FILE.py:FUNCTION", help="a run file, or a function of yours (default: the embedded run)"
    )
    one.add_argument("--out", type=Path, help="folder of the run (default: runs/NAME of the run file, runs/default)")
    one.add_argument("--workers", type=int, help="processes on this machine (default: one for each GPU, two on a CPU)")
    one.add_argument("--port", type=int, help="port on which the workers meet (default: one that the kernel picks)")
    one.add_argument("--resume", default="auto", metavar="auto|never|required|STEP", help="which checkpoint to go on from (default: auto)")
    one.add_argument("--show", action="store_true", help="print every value and where it came from, and end")

    one = command("evaluate", evaluate, "score the checkpoints of a run on its held-out text")
    one.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    one.add_argument("--step", type=int, help="the checkpoint to score (default: the newest)")
    one.add_argument("--follow", action="store_true", help="wait for new checkpoints until the run is finished")
    one.add_argument("--split", choices=["validation", "test"], default="validation", help="which held-out text (default: validation)")
    one.add_argument("--beams", type=int, default=1, help="1: greedy; more: beam search of that width")
    one.add_argument("--average", type=int, default=0, metavar="N", help="score the mean of the newest N checkpoints' weights")
    one.add_argument("--workers", type=int, default=1, help="processes that share the work; the answer is the same for any number")

    one = command("translate", translate, "translate a text, or lines from standard input")
    one.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    one.add_argument("text", nargs="*", help="what to translate; nothing: lines from standard input")
    one.add_argument("--step", type=int, help="the checkpoint to use (default: the newest)")
    one.add_argument("--beams", type=int, default=1, help="1: greedy; more: beam search of that width")
    one.add_argument("--average", type=int, default=0, metavar="N", help="use the mean of the newest N checkpoints' weights")
    one.add_argument("--compile", action="store_true", help="compile the decoder; pays off for long files")

    one = command("checkpoint", checkpoint, "list, verify, digest or export the checkpoints of a run")
    one.add_argument("action", choices=["list", "verify", "digest", "export"])
    one.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    one.add_argument("step", nargs="?", type=int, help="digest, export: the checkpoint (default: the newest)")
    one.add_argument("--out", type=Path, help="export: the .safetensors file to write")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        top = parser()
        if words[:1] == ["train"] and {"--help", "-h"} & set(words):
            print_train_help(top)
            return 0
        words, values = take_values(words) if words[:1] == ["train"] else (words, [])
        args, rest = top.parse_known_args(words)
        rest += values
        if args.version:
            from importlib.metadata import version

            print(version("lockstep-train"))
            return 0
        if not args.command:
            top.print_help()
            return 2
        log.set_up()
        return int(args.run(args, rest))
    except LockstepError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


TRAIN_OPTIONS = ("out", "workers", "port", "resume", "show", "help")


def take_values(words: list[str]) -> tuple[list[str], list[str]]:
    """(words for argparse, the `--section.key value` pairs): argparse takes the value of an option it does not know for the run file."""
    ours: list[str] = []
    values: list[str] = []
    rest = iter(words)
    for word in rest:
        name = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or name in TRAIN_OPTIONS:
            ours.append(word)
        else:
            values += [word] if "=" in word else [word, *[value for value in [next(rest, None)] if value is not None]]
    return ours, values


def print_train_help(top: Parser) -> None:
    """The options of train and every key of a run, from the schema itself."""
    from lockstep.config import leaves

    train_parser = top._subparsers._group_actions[0].choices["train"]  # type: ignore[union-attr, index]
    keys = leaves()
    width = max(map(len, keys)) + 2
    lines = [f"  --{one.key:<{width}} {one.doc} (default: {one.default!r})" for one in keys.values()]
    train_parser.epilog = (
        "values of the run, as --section.key VALUE, in the run file, or as LOCKSTEP_SECTION_KEY:\n" + "\n".join(lines) + "\n\n" + EXIT_CODES
    )
    train_parser.print_help()


def refuse(rest: list[str], command: str) -> None:
    """UsageError for words that the command does not know."""
    if rest:
        raise UsageError(f"unknown option {rest[0]!r}", "command line", f"see lockstep {command} --help")


def train(args: argparse.Namespace, rest: list[str]) -> int:
    """Start the workers of this machine, or be one of them when the environment says so."""
    from lockstep.checkpoint.choose import choose
    from lockstep.checkpoint.seal import committed_steps
    from lockstep.config import open_run, read_flags, show
    from lockstep.launch import default_workers, launch, worker_main
    from lockstep.place import find_place

    flags = read_flags(rest)
    script = args.what if args.what and (":" in args.what or args.what.endswith(".py")) else None
    file = Path(args.what) if args.what and not script else None
    folder = args.out or Path("runs") / (file.stem if file else "default")
    place, found = find_place(os.environ)
    if not script:
        resolved = open_run(folder, file, flags, os.environ)
        if args.show:
            print(show(resolved))
            return 0
        choose(args.resume, committed_steps(folder / "checkpoints"))  # refused here, before a process starts
    if place is not None:
        if args.workers not in (None, place.size):
            raise UsageError(
                f"--workers {args.workers}, but {found}", "command line and environment", "leave --workers out, or start that many"
            )
        if script:
            return worker_main(lambda: own_function(script, folder, flags))
        return worker_main(lambda: work(folder, file, flags, args.resume))
    workers, reason = (args.workers, "--workers") if args.workers is not None else default_workers()
    if workers < 1 or (not script and workers > resolved.run.batch.micro_batches):
        most = resolved.run.batch.micro_batches if not script else workers
        raise UsageError(
            f"{workers} workers for a step of {most} micro-batches",
            f"{reason}; batch.micro_batches",
            f"give 1 to {most} workers, or more micro-batches",
        )
    logging.getLogger("lockstep").info("%s: %s", f"{workers} workers" if workers > 1 else "1 worker", reason)
    command = [sys.executable, "-m", "lockstep", "train", *sys.argv[2:]]
    return launch(command, workers, run_folder=folder, port=args.port, environ=os.environ)


def work(folder: Path, file: Path | None, flags: dict[str, str], resume: str) -> int:
    """The life of a worker; its exit code."""
    from lockstep.agree import lead
    from lockstep.config import from_json, open_run, to_json
    from lockstep.evaluate import finish
    from lockstep.signals import exit_code
    from lockstep.train import claim, settle
    from lockstep.train import train as train_run
    from lockstep.world import World

    here = open_run(folder, file, flags, os.environ)
    with World.join(threads=here.run.compute.threads, timeout_s=here.run.parallel.timeout_s) as world, ExitStack() as held:
        log.set_up(rank=world.number, file=log_file(folder, world.node, world.number))
        resolved = from_json(lead(world, lambda: to_json(settle(open_run(folder, file, flags, os.environ), world.device))))
        if not world.joining:
            lead(world, lambda: held.enter_context(claim(folder, resolved)))
        outcome = train_run(resolved, folder, world, resume=resume)
        if not outcome.stopped_by:
            with world.board.during("evaluating"):
                world.redo(lambda: finish(folder, resolved.run, world))
        world.code = exit_code(outcome.stopped_by)
        return world.code


def log_file(folder: Path, node: str, rank: int) -> Path:
    """Where a worker's log goes; the folder is made."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return folder / "logs" / f"{node}-{rank}.log"


def own_function(spelled: str, folder: Path, flags: dict[str, str]) -> int:
    """Call a user's function in a worker: flags are its keyword arguments, checked against its annotations."""
    import inspect

    from pydantic import ValidationError, validate_call

    from lockstep.entry import load_function

    function = load_function(spelled)
    named: dict[str, object] = dict(flags)
    takes = inspect.signature(function).parameters
    if "out" in takes:
        named.setdefault("out", folder)
    unknown = [name for name in named if name not in takes]
    if unknown:
        raise UsageError(
            f"{spelled} takes no --{unknown[0]}", "command line", f"it takes {', '.join('--' + name for name in takes) or 'nothing'}"
        )
    try:
        validate_call(function)(**named)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{first['loc'][0]} {first['input']!r}: {first['msg']}", "command line", f"see {spelled}") from None
    return 0


def evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    """Score checkpoints, in one process or several."""
    refuse(rest, "evaluate")
    from lockstep.launch import launch, worker_main
    from lockstep.place import find_place

    place, _ = find_place(os.environ)
    if place is None:
        command = [sys.executable, "-m", "lockstep", "evaluate", *sys.argv[2:]]
        return launch(command, args.workers, run_folder=None, port=None, environ=os.environ)
    return worker_main(lambda: evaluate_here(args))


def evaluate_here(args: argparse.Namespace) -> int:
    """The life of an evaluating worker."""
    from lockstep.evaluate import evaluate as evaluate_run
    from lockstep.signals import exit_code
    from lockstep.world import World

    with World.join(threads=1) as world:
        log.set_up(rank=world.rank)
        asked = {"step": args.step, "split": args.split, "beams": args.beams, "average": args.average, "follow": args.follow}
        return exit_code(evaluate_run(args.folder, world, **asked))


def translate(args: argparse.Namespace, rest: list[str]) -> int:
    """Print translations, and nothing else, on standard output."""
    refuse(rest, "translate")
    from lockstep.generate import translate as translate_texts
    from lockstep.models.weights import load_for_use

    loaded = load_for_use(args.folder, step=args.step, average=args.average)
    texts = args.text or [line.rstrip("\n") for line in sys.stdin]
    for line in translate_texts(loaded.model, loaded.tokenizer, texts, beams=args.beams, compile=args.compile):
        print(line)
    return 0


def checkpoint(args: argparse.Namespace, rest: list[str]) -> int:
    """List, verify, digest, export."""
    refuse(rest, "checkpoint")
    from lockstep.checkpoint import commands

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
