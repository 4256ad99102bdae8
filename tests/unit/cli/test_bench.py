"""The options of `lockstep bench`."""

from __future__ import annotations

from argparse import Namespace

import pytest

from lockstep.cli import launch
from lockstep.cli.bench import parse_sizes
from lockstep.cli.main import main
from lockstep.cli.options import COMM_SIZES
from lockstep.errors import UsageError


def test_sizes_are_parsed() -> None:
    assert parse_sizes("1 KiB, 1 MB,7") == [1024, 1_000_000, 7]
    assert max(parse_sizes(COMM_SIZES)) == 64 << 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a quantity"),
        ("1 KiX", "unknown unit 'KiX'"),
        ("1 KiB;2", "is not a quantity"),
        ("0", "0 bytes is not from"),
        ("17 GiB", "is not from 1 B"),
    ],
)
def test_an_invalid_size_is_refused_with_three_parts(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_sizes(text)
    assert caught.value.where == "command line" and "separate sizes by commas" in caught.value.hint


def test_the_measurement_starts_like_a_user_s_loop_with_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[Namespace, list[str]]] = []
    monkeypatch.setattr(launch, "main", lambda args, rest: started.append((args, rest)) or 0)
    assert (
        main(["bench", "comm", "--workers", "3", "--out", "shared/a.json", "--sizes", "1 KiB"]) == 0
    )
    ((args, rest),) = started
    assert (args.target, str(args.out), args.min, args.workers) == (
        "lockstep.parallel.comm_bench:main",
        "shared/a",
        3,
        3,
    )
    assert rest == ["--file", "shared/a.json", "--sizes", "1024"]


def test_bench_alone_lists_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert capsys.readouterr().out.startswith("lockstep bench comm ")
