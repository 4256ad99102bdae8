"""A user's script: `lockstep run FILE.py`, `lockstep launch FILE.py`, and lockstep.launch(main).

Every worker runs the file as `python FILE.py` would, or `python -m MODULE`. If the script imports
lockstep, or a module beside it opens a Session, a lost worker is replaced while the others keep
their state. What the text does not tell, a Session decides when it opens
(runtime/session_start.py).
"""

import argparse
import ast
import inspect
import os
import re
import runpy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from itertools import accumulate, pairwise
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any, get_args, get_type_hints

from lockstep import log
from lockstep.errors import UsageError, perhaps
from lockstep.layout import REPLICA_AXES
from lockstep.runtime.environment import read_rank_info
from lockstep.runtime.exit_report import worker_main
from lockstep.runtime.worker_env import read_worker_env

# Lockstep's options that may also follow FILE.py; the script's arguments start at the first other
# word.
OPTIONS_AFTER_SCRIPT = (
    "--workers",
    "--min",
    "--max",
    "--hosts",
    "--nodes",
    "--host",
    "--ssh",
    "--restart",
    "--track",
    *(f"--layout.{axis}" for axis in REPLICA_AXES),
)


def launch(main: Callable[..., object], *, workers: int | None = None) -> None:
    """Train with `main` on several workers of this machine.

    Call it in the last line of a script, under `if __name__ == "__main__":`.

    main     a function of this script; command-line flags are its keyword arguments, converted by
             its annotations, else to the type of the default: --steps 100 --no-augment
    workers  processes; None: one for each GPU, two on a CPU

    In a worker (of lockstep, torchrun or srun) it calls main. Otherwise it does not return: this
    process becomes `lockstep run FILE.py`, which starts the workers, replaces lost ones, and exits
    with the code of the run. In a notebook it returns after the run (docs/notebook.md).
    """
    words = sys.argv[1:]
    if worker_env := read_worker_env(os.environ):
        return call(main, words, Path(worker_env.folder))
    rank_info = read_rank_info(os.environ)
    if rank_info is None:
        return call(main, words) if asks_for_help(words) else start_workers(main, workers)
    log.set_up_logging(rank=rank_info.rank)
    if code := worker_main(lambda: call(main, words)):
        sys.exit(code)
    return None


def start_workers(main: Callable[..., object], workers: int | None) -> None:
    """Become `lockstep run FILE.py`; in a notebook, run it."""
    from lockstep.runtime.sources import is_user_code  # hashes all sources

    script = sys.modules["__main__"]
    file, module = getattr(script, "__file__", None), module_of(script)
    is_stdlib = module.partition(".")[0] in sys.stdlib_module_names
    if file and module and (is_stdlib or not is_user_code(script)):
        raise UsageError(
            "lockstep.launch in a program that is not a script file",
            str(file),
            "write the loop to FILE.py and start python FILE.py",
        )
    out = given_out(sys.argv[1:]) if file else ""
    default = getattr(parameters_of(main).get("out"), "default", None)
    if not out and isinstance(default, str | os.PathLike):
        out = os.fspath(default)
    words = ["--workers", str(workers)] if workers is not None else []
    words += ["--out", out] if out else []
    if not file:
        from lockstep.cli import notebook

        text = notebook.script_of(main)
        folder = Path(out or session_folder(ast.parse(text)) or "runs/notebook")
        return notebook.run_script(folder / "notebook.py", text, words)
    if parameters_of(main):
        flags, overrides = split_overrides(sys.argv[1:])
        if not overrides:  # each worker does the same
            arguments_of(main, getattr(main, "__name__", "main"), flags, Path(out))
    target = ["-m", module] if module else [str(file)]
    command = [sys.executable, "-m", "lockstep", "run", *words, *target, "--", *sys.argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def call(function: Callable[..., object], words: list[str], folder: Path | None = None) -> None:
    """Call a user's function with flags as `arguments_of`; without parameters it reads sys.argv."""
    from lockstep.runtime.numerics import seed_unseeded_generators  # loads torch

    has_parameters = bool(parameters_of(function))
    if has_parameters and asks_for_help(words):
        return print_help(function)
    seed_unseeded_generators()  # before the function makes its data and its model
    name = getattr(function, "__name__", "main")
    if not has_parameters:
        function()
        return None
    flags, overrides = split_overrides(words)
    return call_with_flags(function, name, flags, folder, overrides)


def split_overrides(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (flags, the NAME=VALUE words of --override)."""
    from lockstep.config.resolve import parse_flags  # loads pydantic

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--override", action="append", default=[])
    given, flags = parser.parse_known_args(words)
    return parse_flags(flags), given.override


def call_with_flags(
    function: Callable[..., object],
    spelled: str,
    flags: Mapping[str, str],
    folder: Path | None,
    overrides: Sequence[str],
) -> None:
    """Call a user's function with flags as `arguments_of`: they are the values of its run.

    overrides  NAME=VALUE words of --override, which replace flags
    """
    from lockstep.training.function_values import FunctionValues, call_with  # loads torch

    changed = {name: text for name, _, text in (word.partition("=") for word in overrides)}
    given = arguments_of(function, spelled, {**flags, **changed}, folder)
    arguments = {name: item.default for name, item in parameters_of(function).items()} | given
    call_with(function, FunctionValues(arguments, tuple(changed)))


def asks_for_help(words: Sequence[str]) -> bool:
    return words[-1:] in (["-h"], ["--help"])


def print_help(function: Callable[..., object]) -> None:
    print(inspect.getdoc(function) or f"usage: {Path(sys.argv[0]).name} [--NAME VALUE]", end="\n\n")
    for name, parameter in parameters_of(function).items():
        spelled = f"--{name} | --no-{name}" if isinstance(parameter.default, bool) else f"--{name}"
        is_required = parameter.default is parameter.empty
        print(f"  {spelled}", "(required)" if is_required else f"(default: {parameter.default!r})")


def parameters_of(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.items()
    return {
        name: parameter
        for name, parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def arguments_of(
    function: Callable[..., object],
    spelled: str,
    flags: Mapping[str, str],
    folder: Path | None = None,
) -> dict[str, object]:
    """Return a user's function's keyword arguments from flags, checked against `types_of` it.

    spelled  the function, as the user wrote it
    folder   of the run, for the parameter `out` if no flag sets it
    UsageError for an unknown flag, a missing one, and a value of another type.
    """
    from pydantic import TypeAdapter, ValidationError  # --help does not need it

    parameters, types = parameters_of(function), types_of(function, spelled)
    switched_off = {
        f"no-{name}": name for name, kind in types.items() if bool in (kind, *get_args(kind))
    }
    flags = {
        switched_off.get(name, name): "false" if name in switched_off else text
        for name, text in flags.items()
    }
    hint = f"it takes {', '.join('--' + name for name in parameters) or 'nothing'}"
    texts = ({"out": str(folder)} if folder and "out" in parameters else {}) | dict(flags)
    if unknown := [name for name in flags if name not in parameters]:
        near = perhaps(f"--{unknown[0]}", [f"--{name}" for name in parameters])
        more = near or "options of lockstep go before those of the script"
        hint = f"{more}; {hint}"
        raise UsageError(f"{spelled} takes no --{unknown[0]}", "command line", hint)
    if missing := [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in texts
    ]:
        raise UsageError(f"{spelled} needs --{missing[0]}", "command line", hint)
    arguments: dict[str, object] = {}
    for name, text in texts.items():
        try:
            # In a list: pydantic accepts no config beside a dataclass.
            listed: Any = GenericAlias(list, (types.get(name, str),))
            arguments[name] = TypeAdapter(
                listed, config={"arbitrary_types_allowed": True}
            ).validate_python([text])[0]
        except ValidationError as error:
            raise UsageError(
                f"--{name} {text!r}: {error.errors()[0]['msg']}",
                "command line",
                f"see {spelled}: the type is the annotation, else that of the default",
            ) from None
    return arguments


def types_of(function: Callable[..., object], spelled: str) -> dict[str, Any]:
    """Return the types of parameters by name: the annotation, else the type of a default that is
    not None. A parameter that is not in it takes text, and `out` a path."""
    defaults = {name: parameter.default for name, parameter in parameters_of(function).items()}
    types = {
        name: type(default)
        for name, default in defaults.items()
        if default is not None and default is not inspect.Parameter.empty
    }
    try:
        return {"out": Path} | types | get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UsageError(
            f"an annotation of {spelled} cannot be read: {error}",
            "command line",
            "import it outside of TYPE_CHECKING",
        ) from None


def module_of(script: ModuleType) -> str:
    """Return the name of the module that python -m runs as `script`; "" for python FILE.py."""
    spec = getattr(script, "__spec__", None)
    return spec.name if spec else ""


def run_file(file: Path, arguments: list[str], module: str = "") -> int:
    """Run the script in this worker as `python FILE.py ARGUMENTS` does, or `python -m MODULE`;
    return the exit code."""
    from lockstep.runtime.numerics import seed_unseeded_generators  # loads torch

    seed_unseeded_generators()
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(search_folder(file, module)))
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(file), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    return 0


# The command line.


def is_script(target: str | None) -> bool:
    """Whether `target` names FILE.py or FILE.py:FUNCTION."""
    return bool(target) and (":" in str(target) or str(target).endswith(".py"))


def split_at_script(
    words: list[str], values: Mapping[str, int]
) -> tuple[list[str], str, list[str]]:
    """Return (Lockstep's words, FILE.py, the script's arguments); FILE.py is "" without a script.

    values  Lockstep's options, each with the number of its values
    They precede FILE.py, or follow it directly (OPTIONS_AFTER_SCRIPT). What follows them, or --, is
    the script's. Of -m MODULE, FILE.py is the file. UsageError if there is no such module.
    """
    ours: list[str] = []
    script, rest = "", list(words)
    while rest:
        name, equals, _ = rest[0].partition("=")
        if name == "-m" in values and not script and len(rest) > 1:
            script = str(module_file(rest[1]))
            ours, rest = ours + rest[:2], rest[2:]
        elif name in (values if not script else set(OPTIONS_AFTER_SCRIPT) & set(values)):
            taken = 1 if equals else 1 + values[name]
            ours, rest = ours + rest[:taken], rest[taken:]
        elif script or not name.endswith(".py"):
            break
        else:
            script = rest.pop(0)
    return (
        (ours, script, rest[1:] if rest[:1] == ["--"] else rest)
        if script
        else (list(words), "", [])
    )


def given_out(arguments: list[str]) -> str:
    """Return the value of --out among a script's arguments; "" without it."""
    for word, following in pairwise([*arguments, ""]):
        if word == "--out" or word.startswith("--out="):
            return word.partition("=")[2] or following
    return ""


def read_script(file: Path) -> ast.Module:
    """Parse the script. UsageError if it does not exist or is not Python."""
    try:
        return ast.parse(file.read_bytes(), str(file))
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {file}",
            f"command line, in {Path.cwd()}",
            "give the path of a script",
        ) from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"{file} is not Python: {error}", "command line", "python FILE.py shows the place"
        ) from None


def module_file(name: str) -> Path:
    """Return the file that python -m NAME runs, without importing anything. UsageError if none."""
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) if all([top, *rest]) else None
    places = (
        [Path(folder, *rest) for folder in spec.submodule_search_locations or ()] if spec else []
    )
    files = [place / "__main__.py" for place in places]
    files += [place.with_name(f"{place.name}.py") for place in places if rest]
    files += [Path(spec.origin)] if spec and spec.origin and not places and not rest else []
    for file in files:
        if file.suffix == ".py" and file.is_file():
            return file
    raise UsageError(
        f"there is no module {name!r} to run",
        f"command line, in {Path.cwd()}",
        "python -m MODULE shows the reason",
    )


def search_folder(file: Path, module: str) -> Path:
    """Return the folder that Python puts first on the search path for a script or for -m MODULE."""
    return Path.cwd() if module else file.resolve().parent


def read_sources(file: Path, module: str = "") -> list[ast.Module]:
    """Parse the script and the modules that it imports, directly or not, from the folder of the
    script or of -m MODULE. UsageError for the script; modules that are not Python are skipped."""
    folder, path = search_folder(file, module), file.resolve()
    sources = {path: read_script(file)}
    waiting = [*imported_paths(path, sources[path], folder), *prefixes(folder, module)]
    while waiting:
        stem = waiting.pop()
        for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if path.is_file() and path not in sources:
                with suppress(UsageError, OSError):
                    sources[path] = read_script(path)
                    waiting += imported_paths(path, sources[path], folder)
    return list(sources.values())


def imported_paths(path: Path, tree: ast.Module, folder: Path) -> Iterator[Path]:
    """Yield where the module in `path` would find what it imports, without the end of the name."""
    for level, name in imports_of(tree):
        yield from prefixes(path.parents[level - 1] if level else folder, name)


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (level, "a.b") of `import a.b` and of `from a import b`; level: its leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, f"{node.module or ''}.{alias.name}") for alias in node.names)


def prefixes(folder: Path, module: str) -> list[Path]:
    """Return the places of "a.b.c" in a folder, and of its packages."""
    return list(accumulate(filter(None, module.split(".")), Path.joinpath, initial=folder))[1:]


def imports_lockstep(script: ast.Module) -> bool:
    """Return whether the script itself imports lockstep, anywhere."""
    return any(name.partition(".")[0] == "lockstep" for _, name in imports_of(script))


def imports_recipes(module: ast.Module) -> bool:
    return any(name.startswith("lockstep.recipes") for _, name in imports_of(module))


# Words in the names of what parses options, or defines them.
PARSERS = re.compile(
    r"[Aa]rg(s\b|ument|pars)|(\b|_)parse|Parse|flags|\b(absl|cli|click|fire|hydra|typer|tyro)\b"
)


def imports_parser(module: ast.Module, folder: Path) -> bool:
    """Return whether a script imports, from outside of its `folder`, what may define options, by
    its name."""
    known = {"lockstep", *sys.stdlib_module_names}
    return any(
        not (level or top.name in known or top.exists() or top.with_suffix(".py").exists())
        for level, name in imports_of(module)
        if PARSERS.search(name) and (top := folder / name.partition(".")[0])
    )


def names_option(sources: Iterable[ast.Module], option: str, folder: Path) -> bool:
    """Return whether a script may take --NAME: it has a variable, a parameter or a text of this
    name, takes the keys of a recipe, or imports a parser. folder: of its modules"""
    name = re.compile(rf"(^|--){re.escape(option[2:])}\b".replace(r"\-", "[-_]"))
    return any(
        imports_recipes(source)
        or imports_parser(source, folder)
        or any(name.search(name_of(node) or text_of(node)) for node in named_nodes(source))
        for source in sources
    )


def named_nodes(module: ast.Module) -> set[ast.AST]:
    """Return the nodes of a script, without the arguments of lockstep.launch(main, workers=2)."""
    nodes = {*ast.walk(module)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return nodes.difference(*(call.keywords for call in calls if name_of(call.func) == "launch"))


def opens_session(module: ast.Module) -> bool:
    """Return whether an imported module imports lockstep and names what joins the workers."""
    names = map(name_of, ast.walk(module))
    return imports_lockstep(module) and not {"Session", "ElasticRuntime"}.isdisjoint(names)


def session_folder(script: ast.Module) -> str:
    """Return the folder of a module's Session if it is a literal; "" otherwise.
    Session("a"), Session(Path("a")), or the name of a constant or of a parameter with a default."""
    functions = [node for node in ast.walk(script) if isinstance(node, ast.FunctionDef)]
    for scope in [*functions, script]:
        texts = constants(script) | constants(scope)
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and name_of(node.func) == "Session":
                named = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
                for argument in [*node.args, *named][:1]:
                    if text := text_of(argument) or texts.get(getattr(argument, "id", "")):
                        return text
    return ""


def constants(scope: ast.AST) -> dict[str, str]:
    """Return a function's defaults, or a module's constants, that are literal texts, by name."""
    pairs: list[tuple[Any, ast.AST | None]] = []
    if isinstance(scope, ast.FunctionDef):
        given = scope.args
        positional = [*given.posonlyargs, *given.args][::-1]
        pairs = [*zip(positional, given.defaults[::-1], strict=False)]
        pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    elif isinstance(scope, ast.Module):
        assigned = [node for node in scope.body if isinstance(node, ast.Assign)]
        pairs = [(node.targets[0], node.value) for node in assigned]
    return {
        name_of(target): text
        for target, value in pairs
        if isinstance(target, ast.Name | ast.arg) and (text := text_of(value))
    }


def name_of(node: ast.AST) -> str:
    """Return the name of a variable, an attribute or a parameter; "" of anything else."""
    names = (getattr(node, key, "") for key in ("id", "attr", "arg"))
    return next(filter(None, names), "")


def text_of(node: ast.AST | None) -> str:
    """Return the text of "text" or Path("text"); "" for anything else."""
    if isinstance(node, ast.Call) and name_of(node.func) == "Path" and len(node.args) == 1:
        node = node.args[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def folder_of(
    file: Path, sources: Iterable[ast.Module], given: Path | None, arguments: Collection[str]
) -> Path:
    """Return the run's folder: --out (`given`, or among `arguments`), the Session's, or
    runs/NAME."""
    literals = filter(None, map(session_folder, sources))
    name = file.resolve().parent.name if file.stem == "__main__" else file.stem
    return given or Path(given_out(list(arguments)) or next(literals, "") or Path("runs") / name)
