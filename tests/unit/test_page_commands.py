"""Each `lockstep ...` of the pages, in a block or in a sentence, goes through the real parser: the
command, its options and choices, the keys of a run and their values, and the files of the checkout
exist. Nothing starts. tests/distributed/test_docs_commands.py runs the commands of the blocks."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
from support.docs_commands import pages, text_of
from support.launching import ROOT

import lockstep
from lockstep.cli import main
from lockstep.config.resolve import parse_flags, resolve
from lockstep.errors import LockstepError

OWNERS = {"session": lockstep.Session, "lockstep": lockstep}
PAGES = ["../README.md", "index.md", *pages()]
# tools/reference.py writes the one, the other tells of commands as they were.
SKIPPED = {"reference/cli.md", "log.md"}
# Words that a reader replaces, as words that the parser takes.
PLACEHOLDERS = {
    **dict.fromkeys("NMT", "2"),
    "MIN:MAX": "1:2",
    "RUN.toml": "recipes/translate.toml",
    "run.toml": "recipes/llama-pretrain.toml",
    "TARGET": "slurm",
}
START = r"(?<![\w./:-])"  # of a command, in a line of a shell or in a sentence
COMMAND = r"lockstep +([a-z][a-z-]*(?![^ )]).*)"
ABRIDGED = ("are required", "expected one argument")  # in a sentence: `lockstep launch --stop`
EARLIER = "there is no adapter_config.json"  # an earlier command of the page exports the folder


def commands(page: str) -> Iterator[tuple[str, bool]]:
    """Yield what follows `lockstep` in each command of a page, and whether it is in a sentence."""
    text = re.sub(r"\\\n *", " ", text_of(page))
    blocks = re.compile(r"^ *```+ *(\w*).*\n((?:.*\n)*?) *```+$", re.MULTILINE)
    for language, lines in blocks.findall(text):
        start = START if language in ("bash", "console") else r"^(?:\$ )?"
        yield from ((found, False) for found in re.findall(start + COMMAND, lines, re.MULTILINE))
    for code in re.findall("`([^`]+)`", blocks.sub("", text)):
        yield from ((found, True) for found in re.findall(START + COMMAND, " ".join(code.split())))


def words_of(command: str) -> list[str]:
    """Return the words until an operator of the shell, a comment, or a column beside it."""
    text = re.sub(r" \.\.\.| ?\[[^]]*\]|   .*", "", command)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&")
    lexer.wordchars += ":,%@+^{}$*="
    words = [PLACEHOLDERS.get(word, word) for word in lexer]
    end = next((place for place, word in enumerate(words) if set(word) <= set("();<>|&")), None)
    return words[:end]


def problem(command: str, is_in_sentence: bool = False) -> str:
    """Return why Lockstep refuses a command; "" if it would start."""
    parsed: list[tuple[argparse.Namespace, list[str]]] = []

    def start(args: argparse.Namespace, rest: list[str]) -> int:
        parsed.append((args, rest))
        return 0

    try:
        words = words_of(command)
        for file in (Path(word.partition(":")[0]) for word in words):
            if file.suffix == ".py" and file.parts[0] != "examples":  # the reader's
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / "examples" / "own_loop.py", file)
            elif file.parts[:1] in (("examples",), ("recipes",)) and not file.exists():
                return f"{command}: there is no {file}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(main, "build_parser", build_parser)
            patch.setattr(main, "find_addresses", lambda *_: [])
            patch.setattr(main, "import_module", lambda _: SimpleNamespace(main=start))
            patch.setattr("lockstep.checkpoint.commands.best_step", lambda _: 1)
            main.run_command(words)
        for args, rest in parsed:
            file = vars(args).get("run_file") or vars(args).get("target")
            if args.command in main.RUN_COMMANDS and not main.is_script(file):
                resolve(file and Path(file), parse_flags(rest), {})
    except (LockstepError, ValueError) as error:
        allowed = (*ABRIDGED, EARLIER) if is_in_sentence else (EARLIER,)
        if not any(words in str(error) for words in allowed):
            return f"{command}: {error}"
    return ""


build_parser = cache(main.build_parser)


@pytest.fixture(autouse=True)
def checkout() -> None:
    """The working folder of a reader."""
    for name in ("examples", "recipes"):
        Path(name).symlink_to(ROOT / name)


def test_lockstep_takes_every_command_of_the_pages() -> None:
    found = {
        page: [why for words in commands(page) if (why := problem(*words))]
        for page in PAGES
        if page not in SKIPPED
    }
    assert not [f"{page}: {why}" for page, problems in found.items() for why in problems]


@pytest.mark.parametrize(
    "command",
    [
        "trian",
        "train --setps 3",
        "train --batch.tokenz 64",
        "train --compute.precision fp7",
        "train recipes/lama-sft.toml",
        "run examples/own_lop.py",
        "drill examples/own_lop.py:train",
        "run train.py --worker 2",
        "checkpoint verfy RUN",
        "lab all-reduce --ranks 2 --bytes 5MB --rate 1MB/s --algorithm rign",
        "replay RUN",
    ],
)
def test_a_wrong_command_is_found(command: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\nlockstep {command}  # comment\n```\n")
    assert [bool(problem(*words)) for words in commands(str(page))] == [True]


def test_every_file_that_a_page_names_exists() -> None:
    named = (
        r"(?<![\w/.-])(?:examples|recipes|tests|bench|tools)/[a-z0-9_/-]+\.(?:py|toml|sh|ipynb)\b"
    )
    for page in PAGES:
        files = re.findall(named, text_of(page))
        assert not [file for file in files if not (ROOT / file).exists()], page


def calls(page: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield each session.NAME(...), lockstep.NAME(...) and NAME(...) of lockstep in the Python."""
    for block in re.findall(
        r"^``` ?(?:python|\{ .python \})\n(.*?)^```", text_of(page), re.M | re.S
    ):
        if "--8<--" in block:  # a script
            continue
        for node in ast.walk(ast.parse(dedent(block))):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name(owner), name)) if owner in OWNERS:
                    yield owner, name, node
                case ast.Call(func=ast.Name(name)) if name in lockstep.__all__:
                    yield "lockstep", name, node


def test_every_name_and_argument_of_a_session_exists() -> None:
    """In sentences the names only. test_questions.py runs the blocks of its page."""
    attributes = set(re.findall(r"self\.(\w+)", inspect.getsource(lockstep.Session)))
    for page in {*PAGES} - {*SKIPPED, "questions.md"}:
        names = set(re.findall(r"\bsession\.(?!py)([a-z]\w*)(?=[(` ])", text_of(page)))
        assert not names - {*dir(lockstep.Session), *attributes}, page
        for owner, name, call in calls(page):
            function = getattr(OWNERS[owner], name)
            before = [None] if owner == "session" else []
            given = {word.arg: None for word in call.keywords if word.arg}
            inspect.signature(function).bind_partial(*before, *call.args, **given)


def test_every_key_of_a_run_file_exists() -> None:
    for page in PAGES:
        for block in re.findall(r"^```toml\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
            if "[[host]]" not in block:
                Path("run.toml").write_text(block)
                resolve(Path("run.toml"), {}, {})
