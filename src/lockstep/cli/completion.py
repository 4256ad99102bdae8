"""`lockstep completion`: print a script that completes words in a shell, from the options and
keys."""

import argparse
import shlex
from collections.abc import Iterator

from lockstep.cli.options import COMMANDS, RUN_COMMANDS, build_parser
from lockstep.config.resolve import recipes
from lockstep.config.schema import config_fields

Word = tuple[
    tuple[str, ...], str, str, tuple[str, ...], bool
]  # commands, option ("": an argument), help, choices, takes a value
BASH = """_lockstep() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=
  case "$COMP_CWORD:${{COMP_WORDS[1]}}:${{COMP_WORDS[COMP_CWORD-1]}}:$word" in
    1:*) words="{commands}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _lockstep lockstep
"""
ZSH = (
    "autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n" + BASH
)  # runs the script of bash


def main(args: argparse.Namespace, rest: list[str]) -> int:
    commands = {name: command.help for name, command in COMMANDS.items()}
    words = list(known_words())
    if args.shell == "fish":
        print("\n".join(fish_lines(commands, words)))
    else:
        script = BASH if args.shell == "bash" else ZSH
        print(
            script.format(
                commands=" ".join([*commands, "--help", "--version"]),
                cases="\n".join(bash_cases(commands, words)),
            ),
            end="",
        )
    return 0


def known_words() -> Iterator[Word]:
    for name, parser in build_parser().commands.items():
        for action in parser._actions:
            option = (action.option_strings or [""])[-1]
            choices = tuple(action.choices or ())
            if (name, action.dest) == ("recipes", "name"):
                choices = tuple(recipes())
            yield (name,), option, action.help or "", choices, action.nargs != 0
    for key, field in config_fields().items():
        yield RUN_COMMANDS, f"--{key}", field.doc, field.choices, True


def bash_cases(commands: dict[str, str], words: list[Word]) -> Iterator[str]:
    """Yield lines of a case statement over POSITION:COMMAND:PREVIOUS WORD:WORD; the first match
    counts."""
    for names, option, _, choices, _ in words:
        if choices:
            yield f'    {"|".join(f"*:{name}:{option or name}:*" for name in names)}) words="{" ".join(choices)}" ;;'
    for name in commands:
        yield f'    *:{name}:*:-*) words="{" ".join(option for names, option, *_ in words if name in names)}" ;;'


def fish_lines(commands: dict[str, str], words: list[Word]) -> Iterator[str]:
    for name, doc in commands.items():
        yield f"complete -c lockstep -n __fish_use_subcommand -f -a {name} -d {shlex.quote(doc)}"
    for names, option, doc, choices, takes_value in words:
        flags = (f" -l {option[2:]}" if option else "") + (
            f" -xa '{' '.join(choices)}'" if choices else " -r" * bool(option and takes_value)
        )
        if flags:
            yield f"complete -c lockstep -n '__fish_seen_subcommand_from {' '.join(names)}'{flags} -d {shlex.quote(doc)}"
