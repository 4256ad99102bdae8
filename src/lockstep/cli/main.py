"""The command `lockstep`: parse the words, call one function, turn an error into an exit code.

Each command is a module of its name with `main(args, rest)`; argparse does not know the words
`rest`. Only the module of the command that runs is imported, so that `lockstep --help` and a
mistyped option answer without torch.
"""

import argparse
import os
import signal
import sys
from collections.abc import Container, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import FrameType

import lockstep
from lockstep import log
from lockstep.cli.options import (
    COMMANDS,
    EXIT_CODES,
    RUN_COMMANDS,
    Parser,
    build_parser,
)
from lockstep.cli.script import (
    asks_for_help,
    folder_of,
    is_script,
    names_option,
    read_sources,
    search_folder,
    split_at_script,
)
from lockstep.errors import (
    LockstepError,
    OutOfMemoryError,
    UsageError,
    perhaps,
    require_text_packages,
)
from lockstep.object_store.address import Address, parse_address
from lockstep.runtime.environment import RESERVED_VARIABLES, read_rank_info
from lockstep.runtime.exit_report import error_summary, is_out_of_memory
from lockstep.runtime.session_start import StartAgainError
from lockstep.runtime.variables import LAYOUT, takes_no_value
from lockstep.runtime.worker_env import read_worker_env


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    # Of a container: the kernel drops signals without a handler, and the agent's follow after its
    # imports
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, exit_at_once)
    try:
        return run_command(words, is_process=argv is None)
    except LockstepError as error:
        failure = error
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        what = f"{error.filename}: {error.strerror}"
        failure = UsageError(
            what, f"lockstep {words[0]}", "give a path that this user can read and write"
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        what = f"out of memory: {error_summary(error)}"
        failure = OutOfMemoryError(
            what, f"lockstep {words[0]}", "give shorter texts, or fewer at a time"
        )
    print(failure, file=sys.stderr)
    return failure.exit_code


def refuse_mistyped(command: Parser, words: Sequence[str], target: str, module: str) -> None:
    """UsageError for a word that resembles an option of the command and that its target does not
    know."""
    options = command._option_string_actions
    for name in (word.partition("=")[0] for word in words if word.startswith("--")):
        near = perhaps(name, options)
        if not near or knows(target, module, name, options):
            continue
        if not is_script(target):
            raise command.unknown(name)
        what, hint = f"unknown option {name!r}", near
        if name in options:
            what = f"{name} follows {target}, which does not name it"
            hint = f"give it before {target}"
        raise UsageError(what, "command line", f"{hint}; behind -- it is passed to {target}")


def knows(target: str, module: str, name: str, options: Container[str]) -> bool:
    """Return whether a run file has this key, or the source of a script or function names it."""
    if is_script(target):
        file = Path(target.partition(":")[0])
        folder = search_folder(file, module)
        return file.suffix != ".py" or names_option(read_sources(file, module), name, folder)
    from lockstep.config.schema import config_fields  # loads pydantic

    # An option here means that the key before it has no value: parse_flags refuses that.
    return name in options or name[2:] in config_fields()


def exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def run_command(given: list[str], *, is_process: bool = False) -> int:
    """Run the command. is_process: nothing else runs in this process"""
    refuse_invalid_utf8(given)
    parser = build_parser()
    name = given[0] if given else ""
    subparser = parser.commands.get(name, parser)
    words, script, arguments = split_script(parser, given)
    if name in RUN_COMMANDS and not script:
        if {"--help", "-h"} & set(words):
            print_run_help(subparser)
            return 0
        words, arguments = split_values(subparser, words)
    if name in COMMANDS:
        subparser.refuse_unknown(words[1:])
        if arguments and "--" not in given:
            targets = (word for word in words[1:] if is_script(word) and not word[0].isdecimal())
            module = words[words.index("-m") + 1] if "-m" in words else ""
            refuse_mistyped(subparser, arguments, script or next(targets, ""), module)
    args, rest = parser.parse_known_args([*words, script] if script else words)
    if args.version:
        print(lockstep.__version__)
        return 0
    if not args.command:
        parser.print_help()
        return 2
    command = COMMANDS[args.command]
    if rest and not command.rest:
        raise subparser.unknown(rest[0])
    if command.needs_text and not (is_script(vars(args).get("target")) or only_answers(args)):
        require_text_packages(f"lockstep {args.command}, for the texts of a recipe")
    log.set_up_logging()
    if not command.takes_address and (addresses := find_addresses(args, script, arguments)):
        from lockstep.cli.remote import run_remote

        return run_remote(args, given, addresses, [*rest, *arguments])
    if is_process and becomes_agent(args, [*rest, *arguments]):
        from lockstep.agent.forkserver import PRELOAD, RECIPE_PRELOAD, WorkerProgram, start_early

        preload = PRELOAD if args.command == "run" else RECIPE_PRELOAD
        start_early(WorkerProgram((), preload=preload))
    if getattr(args, "step", None) == "best":
        from lockstep.checkpoint.commands import best_step  # loads numpy

        args.step = best_step(args.folder)
    # Loads pydantic, which --help does not need.
    from lockstep.config.resolve import refuse_unknown_variables

    refuse_unknown_variables(os.environ, RESERVED_VARIABLES)
    start = import_module(f"lockstep.cli.{args.command}").main
    try:
        return int(start(argparse.Namespace(**vars(args)), [*rest, *arguments]))
    except StartAgainError as again:  # of a script with a Session, before its first step
        log.log.info("%s; starting again: lockstep %s %s", again.what, args.command, again.options)
        args.restart, args.out = "one", args.out or (Path(again.out) if again.out else None)
        return int(start(args, [*rest, *arguments]))


def only_answers(args: argparse.Namespace) -> bool:
    """Whether the command only shows values, or stops a run: --show, --stop RUN."""
    return bool(vars(args).get("show")) or isinstance(vars(args).get("stop"), Path)


def becomes_agent(args: argparse.Namespace, rest: Sequence[str]) -> bool:
    """Return whether this process will most likely start workers of the usual program, in its
    present environment."""
    if args.command == "run":
        # These become variables for the Sessions of the workers.
        changes = [args.track, args.profile, *(vars(args)[f"layout.{axis}"] for axis in LAYOUT)]
        changes.append(asks_for_help(rest))
    elif args.command == "train":
        changes = [args.show, args.layout, args.profile, is_script(args.target)]
    else:
        return False
    with suppress(UsageError):  # of variables, which the start refuses
        is_alone = not read_worker_env(os.environ) and not read_rank_info(os.environ)
        return is_alone and not any(changes)
    return False


def find_addresses(args: argparse.Namespace, script: str, arguments: list[str]) -> list[Address]:
    """Return the run folders that are addresses, s3://BUCKET/RUN; [] for folders of this host."""
    paths = [vars(args).get(name) for name in ("folder", "compare", "out", "stop")]
    if script and args.out is None:
        paths = [
            folder_of(Path(script), read_sources(Path(script), args.module or ""), None, arguments)
        ]
    addresses = [parse_address(path) for path in paths if isinstance(path, Path)]
    return [*filter(None, addresses)]


def refuse_invalid_utf8(words: Sequence[str]) -> None:
    """UsageError for words that JSON, a tokenizer and other hosts cannot represent."""
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(
                f"{word!r} is not valid UTF-8",
                "command line",
                "rename the file, or convert the text: iconv -f latin1 -t utf-8",
            )


def split_script(parser: Parser, words: list[str]) -> tuple[list[str], str, list[str]]:
    """Return (our words, FILE.py, its arguments); FILE.py is "" without a script."""
    if words[:1] not in (["run"], ["launch"]):
        return words, "", []
    options = parser.commands[words[0]]._option_string_actions
    ours, script, arguments = split_at_script(
        words[1:], {name: 0 if option.nargs == 0 else 1 for name, option in options.items()}
    )
    return [words[0], *ours], script, arguments


def split_values(command: Parser, words: list[str]) -> tuple[list[str], list[str]]:
    """Return (words for argparse, the `--section.key VALUE` words). argparse would take the value
    of an option that it does not know as the run file."""
    ours: list[str] = []
    values: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("--") or word.partition("=")[0] in command._option_string_actions:
            ours.append(word)
        else:
            values += [word] if "=" in word or takes_no_value(word) else [word, *islice(rest, 1)]
    return ours, values


def print_run_help(command: Parser) -> None:
    # Loads pydantic, which the other commands' --help does not need.
    from lockstep.config.schema import config_fields

    keys = config_fields()
    width = max(map(len, keys)) + 2
    choices = {key: f"{', '.join(field.choices)}; " for key, field in keys.items() if field.choices}
    lines = [
        f"  --{key:<{width}} {field.doc} ({choices.get(key, '')}default: {field.default!r})"
        for key, field in keys.items()
    ]
    head = "values of the run, as --section.key VALUE, in the run file, or as LOCKSTEP_SECTION_KEY:"
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = "\n".join([head, *lines, "", EXIT_CODES])
    command.print_help()
