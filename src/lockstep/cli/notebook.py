"""lockstep.launch in a notebook: write main and what it uses to a script, and run that.

A fresh process cannot import the functions of a notebook. So their sources, and the imports and the
literals that they use, become RUN/notebook.py, an ordinary script that every worker runs:
tracebacks show its lines, and other hosts can run it.
"""

import __future__

import ast
import dis
import inspect
import linecache
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lockstep.errors import LockstepError, UsageError
from lockstep.files import write_atomic

LITERALS = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set)
GLOBAL_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
SCRIPT = """# Written by lockstep.launch in a notebook: {name} and what it uses.
{future}import sys

sys.path.insert(0, {cwd!r})

{definitions}

if __name__ == "__main__":
    import lockstep

    lockstep.launch({name})
"""


def script_of(main: Callable[..., object]) -> str:
    """Return a script that defines and launches `main`. UsageError for what no script can
    recreate."""
    if not isinstance(main, FunctionType) or main.__name__ == "<lambda>":
        raise UsageError(
            f"lockstep.launch takes a function that a cell defines with def, not {main!r}",
            "a notebook",
            "write def main(...): in a cell",
        )
    found: dict[str, str] = {}
    define(main.__name__, main, "lockstep.launch", main.__globals__, found)
    future = (
        "from __future__ import annotations\n"
        if main.__code__.co_flags & __future__.annotations.compiler_flag
        else ""
    )
    return SCRIPT.format(
        name=main.__name__, future=future, cwd=os.getcwd(), definitions="\n\n".join(found.values())
    )


def define(
    name: str, value: Any, user: str, names: Mapping[str, Any], found: dict[str, str]
) -> None:
    """Add the source of the global `name` to `found`, behind the globals that it uses.
    user: what uses it; names: the globals of the notebook."""
    if name in found:
        return
    found[name] = ""  # functions may call each other
    module = getattr(value, "__module__", None)
    own = getattr(value, "__qualname__", "")
    source = ""
    if isinstance(value, ModuleType):
        source = f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else "")
    elif module == "__main__" and own == name:
        source = source_of(value, names)
        for used in (
            sorted(names_read(compile(source, "notebook", "exec", dont_inherit=True)) & set(names))
            if source
            else []
        ):
            define(used, names[used], name, names, found)
    elif own and getattr(sys.modules.get(str(module)), own, None) is value:
        source = f"from {module} import {own}" + (f" as {name}" if own != name else "")
    elif isinstance(value, LITERALS):
        with suppress(ValueError, SyntaxError):
            source = f"{name} = {value!r}" if ast.literal_eval(repr(value)) == value else ""
    if not source:
        kind = "a lambda" if "<lambda>" in own else f"of type {type(value).__name__}"
        own_function = isinstance(value, FunctionType)
        raise UsageError(
            f"{user} uses the global {name}, {kind}, which a fresh process cannot recreate",
            "a notebook: workers run the sources, the imports and the literals that main uses",
            f"write def {name}(...): at the top of a cell"
            if own_function
            else f"create it in {user}, or in a function that it calls",
        )
    found[name] = found.pop(name) or source


def names_read(code: CodeType) -> set[str]:
    """Return the names that code of a module reads from outside of its functions."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in GLOBAL_READS} - {
        "__name__"
    }
    return names.union(
        *(names_read(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    )


def source_of(value: Any, names: Mapping[str, Any]) -> str:
    """Return the source of a function or class of the notebook; "" if it is not known."""
    with suppress(OSError, TypeError):
        if not isinstance(value, type):
            return textwrap.dedent(inspect.getsource(value))
    # inspect expects a class in the file of its module. Without methods it is in the newest cell
    # that defines it.
    files = [
        method.__code__.co_filename
        for method in vars(value).values()
        if isinstance(method, FunctionType)
    ]
    for cell in ["".join(linecache.getlines(file)) for file in files] + names.get("In", [])[::-1]:
        with suppress(SyntaxError):
            for node in ast.walk(ast.parse(cell)):
                if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                    first = min(
                        [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
                    )
                    return textwrap.dedent(
                        "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
                    )
    return ""


def run_script(file: Path, text: str, words: Sequence[str]) -> None:
    """Write the script, run its workers and show their output here. LockstepError if the run fails.
    An interrupt of the kernel stops the workers after a step; KeyboardInterrupt when they have
    ended."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text)
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "--parent",
        str(os.getpid()),
        *words,
        str(file),
    ]
    interrupted = False
    # In a new session: Jupyter interrupts the whole process group of the kernel.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        while True:
            try:
                for line in process.stdout or ():
                    print(line, end="", flush=True)
                process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
                print(
                    "interrupted: the workers save after this step and end; "
                    "interrupt again to kill them",
                    flush=True,
                )
    if interrupted:
        print(
            f"the workers have ended (exit code {process.returncode}); "
            "run the cell again to resume",
            flush=True,
        )
        raise KeyboardInterrupt
    if process.returncode:
        raise LockstepError(
            f"the run ended with exit code {process.returncode}",
            str(file),
            "the error is printed above",
        )
