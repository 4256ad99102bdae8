"""`lockstep recipes`: list the run files and scripts that come with Lockstep, print or copy one."""

import argparse
from pathlib import Path

from lockstep.config.resolve import recipes
from lockstep.errors import UsageError

# The scripts in lockstep/recipes, and the words of a run that needs no other files.
SCRIPTS = {
    "translate": "",
    "language_model": " recipes/llama-pretrain.toml",
    "diloco": " --diloco.learners 4 --diloco.every 20",
}


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if args.name[:1] == ["copy"]:
        copy_script(args.name[1:])
    elif len(args.name) > 1:
        raise UsageError(
            f"{len(args.name)} names: {' '.join(args.name)}",
            "command line",
            "give one name, or copy SCRIPT FILE",
        )
    elif args.name:
        print(text_of(args.name[0]), end="")
    else:
        print_list()
    return 0


def copy_script(words: list[str]) -> None:
    """Write a script to a new file."""
    if len(words) != 2:
        raise UsageError(
            f"copy takes a script and a file, not {words}",
            "command line",
            "write lockstep recipes copy translate my.py",
        )
    name, file = words[0], Path(words[1])
    if name not in SCRIPTS:
        raise UsageError(
            f"there is no script {name!r}",
            "lockstep recipes copy",
            f"available: {', '.join(SCRIPTS)}",
        )
    if file.suffix != ".py":
        raise UsageError(
            f"{file} does not end in .py",
            "lockstep recipes copy",
            "give the name of a new Python file, such as my.py",
        )
    try:
        with file.open("x", encoding="utf-8") as copy:
            copy.write(script_path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{file} was not written: {error.strerror}",
            "lockstep recipes copy",
            "give a new file in a folder that exists",
        ) from None
    print(f"{file}: lockstep run --workers 2 {file}{SCRIPTS[name]} --steps 40")


def available() -> dict[str, Path]:
    """Return the run files by name, and the scripts as NAME.py."""
    return recipes() | {f"{name}.py": script_path(name) for name in SCRIPTS}


def text_of(spelled: str) -> str:
    """Return the text of a run file or script. UsageError: there is none of this name."""
    files = available()
    name = spelled.removeprefix("recipes/").removesuffix(".toml")
    if name not in files:
        raise UsageError(
            f"there is no recipe {spelled!r}", "command line", f"available: {', '.join(files)}"
        )
    return files[name].read_text(encoding="utf-8")


def print_list() -> None:
    files = available()
    width = max(map(len, files))
    for name in files:
        print(f"{name:<{width}}  {first_sentence(text_of(name))}")
    print(
        "\nlockstep recipes NAME > NAME.toml copies a run file; lockstep train NAME.toml trains it"
        "\nlockstep recipes copy translate my.py copies a script; lockstep run my.py trains it"
    )


def script_path(name: str) -> Path:
    return Path(__file__).parents[1] / "recipes" / f"{name}.py"


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment or docstring at the start of a file."""
    if text.startswith('"""'):
        return text[3:].partition(": ")[0]
    lines = [line.lstrip("# ") for line in text.splitlines()]
    comment = " ".join(lines[: lines.index("")] if "" in lines else lines)
    return comment.partition(". ")[0].rstrip(".")
