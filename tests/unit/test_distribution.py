"""The sdist and the wheel work outside the repository: built, installed in a fresh environment, used in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.launching import ROOT, one_thread, unpack

import lockstep

SMALL = (
    "--workers 2 --steps 3 --data.pairs 500 --data.held_out 20 --tokenizer.vocab_size 400 --model.dim 16 --model.ffn_dim 32 "
    "--evaluate.at_end 0"
)


def build(source: Path, kind: str, out: Path) -> Path:
    """Return the distribution that the build backend makes of `source`: kind sdist or wheel."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (made,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return made


def install(wheel: Path, folder: Path) -> Path:
    """Return the folder with the commands of a new environment: the wheel, and the packages of this one."""
    venv.create(folder, with_pip=False)
    site = (
        folder
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    packages = {
        str(Path(str(spec.origin)).parents[1])
        for name in ("torch", "pydantic")
        if (spec := find_spec(name))
    }
    (site / "packages.pth").write_text("\n".join(sorted(packages)))
    words = [
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
        str(wheel),
    ]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The sdist, the wheel of the repository, and the wheel of the unpacked sdist."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("distribution")
    sdist = build(ROOT, "sdist", folder / "sdist")
    unpack(sdist, folder / "source")
    (source,) = (folder / "source").iterdir()
    return sdist, build(ROOT, "wheel", folder / "wheel"), build(source, "wheel", folder / "again")


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_the_wheel_has_every_module_and_recipe_and_equals_that_of_the_sdist(
    built: tuple[Path, Path, Path],
) -> None:
    sdist, wheel, again = built
    modules = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    recipes = {f"lockstep/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    assert modules | recipes <= names(wheel) and "lockstep/py.typed" in names(wheel)
    assert names(wheel) == names(again)
    assert not {
        name
        for name in names(wheel)
        if not name.startswith(("lockstep/", f"lockstep_train-{lockstep.__version__}.dist-info/"))
    }
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "pyproject.toml",
        "constraints.txt",
        "tests/conftest.py",
    } <= inside
    assert sdist.stat().st_size < 5_000_000


@pytest.fixture
def run(built: tuple[Path, Path, Path], tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs a command of the installed wheel in an empty folder."""
    commands, empty = install(built[1], tmp_path / "venv"), tmp_path / "empty"
    empty.mkdir()
    environ = one_thread(PATH=f"{commands}:{os.environ['PATH']}", LOCKSTEP_TMP=str(tmp_path))
    environ.pop("PYTHONPATH", None)

    def run(command: str) -> str:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=empty,
            env=environ,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert run("python -c 'import lockstep; print(lockstep.__file__)'").startswith(
        str(tmp_path / "venv")
    )
    return run


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(run: Callable[[str], str]) -> None:
    assert run("lockstep --version").strip() == lockstep.__version__
    assert "llama-sft" in run("lockstep recipes")
    assert '"sft"' in run("lockstep train recipes/llama-sft.toml --show").splitlines()[0]
    assert (
        tomllib.loads(run("lockstep recipes translate > mine.toml; cat mine.toml"))["steps"]
        == 20000
    )
    assert run("lockstep completion bash | bash -n && lockstep train mine.toml --show").startswith(
        "task"
    )


@pytest.mark.long
def test_the_wheel_trains_in_an_empty_folder(run: Callable[[str], str]) -> None:
    run(f"lockstep train {SMALL} --out run")
    assert "step 3 sha256" in run(
        "lockstep checkpoint verify run && lockstep checkpoint digest run"
    )


def test_the_version_is_that_of_the_citation() -> None:
    assert f"\nversion: {lockstep.__version__}\n" in (ROOT / "CITATION.cff").read_text()
