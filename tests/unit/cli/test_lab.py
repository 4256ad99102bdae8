"""The command `lockstep lab`: its pages in the docs, its pictures, its errors."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.docs_commands import text_of

from lockstep.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"
PAGES = "".join(map(text_of, ("collectives.md", "ordered-sum.md"))).replace("\\\n", "")
BLOCKS = re.findall(r"```console\n\$ lockstep ([^\n]*)\n(.*?)```", PAGES, re.DOTALL)
PICTURES = {
    "broadcast-tree": 'broadcast --ranks 8 --bytes "5 MB" --rate "1 MB/s" --algorithm tree',
    "reduce-tree": 'reduce --ranks 8 --bytes "5 MB" --rate "1 MB/s" --algorithm tree',
    "all-reduce-ring": 'all-reduce --ranks 4 --bytes "5 MB" --rate "1 MB/s" --algorithm ring',
    "all-reduce-halving": 'all-reduce --ranks 8 --bytes "25 MB" --rate "1 Gbit/s" --latency "50 us" --algorithm halving',
}
SMALL = ["lab", "broadcast", "--ranks", "8", "--bytes", "5 MB", "--rate", "1 MB/s"]


@pytest.mark.parametrize(("command", "output"), BLOCKS)
def test_the_page_shows_what_the_command_prints(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == output


def test_the_page_has_the_engines_exchange() -> None:
    assert (
        sum("all-reduce" in command and "--algorithm halving" in command for command, _ in BLOCKS)
        == 2
    )


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_page_are_drawn_by_the_command(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert main(["lab", *shlex.split(PICTURES[name]), "--picture", str(path)]) == 0
    assert path.read_text() == (DOCS / "pictures" / f"{name}.svg").read_text()
    lines = ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}line")
    arrows = [line for line in lines if line.get("marker-end")]
    assert (
        len(arrows)
        == {"broadcast-tree": 7, "reduce-tree": 7, "all-reduce-ring": 24, "all-reduce-halving": 48}[
            name
        ]
    )
    assert f"pictures/{name}.svg" in PAGES


@pytest.mark.parametrize(("algorithm", "seconds"), [("naive", 35), ("direct", 35), ("tree", 15)])
def test_last_line_is_the_total_time(
    algorithm: str, seconds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--algorithm", algorithm]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == f"total time of {algorithm}: {seconds}.000000 s"
    )
    assert main([*SMALL, "--algorithm", algorithm, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(seconds)


def test_fastest_algorithm_changes_at_the_printed_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL[:3], "12", "--rate", "1 MB/s", "--latency", "5 ms", "--json"]
    assert main([*words, "--bytes", "1 MB"]) == 0
    changes = json.loads(capsys.readouterr().out)["fastest_from_bytes"]
    assert [name for _, name in changes] == ["tree", "halving", "ring"]
    for (size, fast), (_, slow) in zip(changes[1:], changes, strict=False):
        for factor, expected in ((0.95, slow), (1.05, fast)):
            assert main([*words, "--bytes", str(int(size * factor))]) == 0
            assert json.loads(capsys.readouterr().out)["fastest"] == expected


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--ranks", "1"], ["'1' is not an integer from 2 to 65,536", "see lockstep lab --help"]),
        (["--bytes", "5 parsecs"], ["unknown unit 'parsecs'"]),
        (["--bytes", "0"], ["'0' is not above zero"]),
        (["--rate", "100 Mb/s"], ["may mean bits or bytes", "100 Mbit/s"]),
        (["--rate", "0 MB/s"], ["no rate from 1 B/s to 1000 TB/s"]),
        (["--rate", "1e300 MB/s"], ["no rate from 1 B/s to 1000 TB/s"]),
        (["--latency", "50 miles"], ["unknown unit 'miles'"]),
        (["--algorithm", "fast"], ["invalid choice: 'fast'", "'halving'"]),
        (
            ["--algorithm", "hierarchical"],
            ["no hierarchical broadcast", "naive, direct, tree, ring, halving"],
        ),
        (["--ranks-per-host", "3"], ["8 ranks do not fill hosts of 3", "give one of 1, 2, 4, 8"]),
        (["--host-rate", "1 GB/s"], ["--host-rate", "give --ranks-per-host 2 or more"]),
        (["--picture", "out.svg"], ["--picture without --algorithm"]),
        (
            ["--picture", "/nowhere/out.svg", "--algorithm", "tree"],
            ["/nowhere/out.svg: No such file"],
        ),
        (["--run", "--ranks", "1000"], ["--run with 1,000 ranks", "at most 64 ranks"]),
        (["--fast"], ["unknown option '--fast'"]),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error
    assert len(error.splitlines()) == 3


@pytest.mark.parametrize("missing", ["--ranks", "--bytes", "--rate"])
def test_missing_options_are_named(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = SMALL.index(missing)
    assert main([*SMALL[:at], *SMALL[at + 2 :]]) == 2
    assert f"required: {missing}" in capsys.readouterr().err


def test_large_schedules_are_drawn_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.svg"
    words = [
        "lab",
        "all-gather",
        "--ranks",
        "40",
        "--bytes",
        "4 MB",
        "--rate",
        "1 GB/s",
        "--algorithm",
        "ring",
    ]
    assert main([*words, "--picture", str(path)]) == 0
    assert "not drawn: 23 more rounds and 24 more ranks" in capsys.readouterr().out
    assert "23 more rounds and 24 more ranks" in path.read_text()
