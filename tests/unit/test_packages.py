"""The packages of src are layered; the command finds upward imports and cycles."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src/lockstep"
TOOL = runpy.run_path(str(SRC.parents[1] / "tools/packages.py"))
LAYERS, main, repeated_class_names = TOOL["LAYERS"], TOOL["main"], TOOL["repeated_class_names"]


def write_package(top: Path, **files: str) -> str:
    for name, text in files.items():
        path = top / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(top)


def test_the_source_has_no_upward_import_and_no_cycle(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "package arrows" in output.out


def test_an_upward_import_fails_with_its_statement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    top = write_package(
        tmp_path,
        data__order="from lockstep.errors import DataError",
        errors="def f():\n    import lockstep.data.order",
    )
    assert main([top]) == 1
    output = capsys.readouterr()
    assert output.err == "error: upward import: errors -> data.order\n"
    assert "data           1 file  -> errors 1" in output.out


def test_a_cycle_inside_a_layer_fails_with_its_packages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    top = write_package(
        tmp_path,
        units="from lockstep import files",
        files="from lockstep.log import a",
        log="import lockstep.units",
        layout="",
    )
    assert main([top]) == 1
    assert capsys.readouterr().err == "error: import cycle among files, log, units\n"


def test_a_package_without_a_layer_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write_package(tmp_path, novel__page="", errors="")]) == 1
    assert "package novel has no layer" in capsys.readouterr().err


def test_the_public_names_of_the_root_are_no_package(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("from lockstep.session import Session")
    top = write_package(tmp_path, errors="from lockstep import __version__", session="")
    assert main([top]) == 0


def test_the_top_level_has_at_most_ten_files() -> None:
    files = [path.name for path in SRC.glob("*.py")]
    assert len(files) <= 10, files


def test_no_two_classes_of_src_share_a_name() -> None:
    assert repeated_class_names(ast.parse(path.read_text()) for path in SRC.rglob("*.py")) == []


def test_each_package_has_one_layer() -> None:
    packages = [package for layer in LAYERS for package in layer]
    assert len(packages) == len(set(packages))


def test_the_documented_layers_are_the_checked_ones() -> None:
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    rows = [
        line.split("|")[1]
        for line in page.partition("| package |")[2].split("\n\n")[0].splitlines()[2:]
    ]
    assert [tuple(row.replace("`", "").split()) for row in rows] == [
        tuple(name for name in layer if name != "__main__") for layer in LAYERS
    ]
