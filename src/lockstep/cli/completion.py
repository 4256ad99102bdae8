"""`lockstep completion`: print a script that completes words in a shell, from the options and
keys."""

import argparse
import shlex
from collections.abc import Iterator

from jinja2 import Environment, StrictUndefined

from lockstep.cli.options import COMMANDS, RUN_COMMANDS, build_parser
from lockstep.config.resolve import recipes
from lockstep.config.schema import config_fields

# Commands, option ("": an argument), help, choices, takes a value.
Word = tuple[tuple[str, ...], str, str, tuple[str, ...], bool]
# Cases over POSITION:COMMAND:PREVIOUS WORD:WORD; the first match counts.
BASH = """\
_lockstep() {
  local word=${COMP_WORDS[COMP_CWORD]} words=
  case "$COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[COMP_CWORD-1]}:$word" in
    1:*) words="{{ commands | join(" ") }} --help --version" ;;
{% for names, option, _, choices, _ in words if choices %}
    {% for name in names %}*:{{ name }}:{{ option or name }}:*{{ "|" if not loop.last }}{%
    endfor %}) words="{{ choices | join(" ") }}" ;;
{% endfor %}
{% for name in commands %}
    *:{{ name }}:*:-*) words="{{ options[name] | join(" ") }}" ;;
{% endfor %}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _lockstep lockstep
"""
# Runs the script of bash
ZSH = "autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n" + BASH
FISH = """\
{% for name, command in commands.items() %}
complete -c lockstep -n __fish_use_subcommand -f -a {{ name }} -d {{ command.help | quote }}
{% endfor %}
{% for names, option, doc, choices, takes_value in words if option or choices %}
complete -c lockstep -n '__fish_seen_subcommand_from {{ names | join(" ") }}'
{%- if option %} -l {{ option[2:] }}{% endif %}
{%- if choices %} -xa '{{ choices | join(" ") }}'{% elif option and takes_value %} -r{% endif %}
 -d {{ doc | quote }}
{% endfor %}
"""


def main(args: argparse.Namespace, rest: list[str]) -> int:
    words = list(known_words())
    options = {name: [word[1] for word in words if name in word[0]] for name in COMMANDS}
    environment = Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["quote"] = shlex.quote
    script = environment.from_string({"bash": BASH, "zsh": ZSH, "fish": FISH}[args.shell])
    print(script.render(commands=COMMANDS, words=words, options=options), end="")
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
