"""`lockstep bench comm`: time collectives between the processes of a run.

The measurement is a function that `lockstep launch` starts like a user's loop.
"""

import argparse

from lockstep.agent.hosts import read_hosts
from lockstep.cli.main import run_command
from lockstep.cli.options import option_words
from lockstep.cli.start import choose_worker_count
from lockstep.errors import UsageError
from lockstep.object_store.address import parse_address
from lockstep.units import parse_bytes

FUNCTION = "lockstep.parallel.comm_bench:main"
MAX_BYTES = 1 << 34
SUBCOMMANDS = (
    "lockstep bench comm   collectives "
    "and messages between the workers: time, bandwidth, slow links"
)


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if args.what is None:
        print(SUBCOMMANDS)
        return 2
    sizes = parse_sizes(args.sizes)
    workers = (
        read_hosts(args.hosts).workers if args.hosts else choose_worker_count(args.workers, None)[0]
    )
    if workers < 2:
        raise UsageError(
            "1 worker has no other one to exchange messages with",
            str(args.hosts or "--workers"),
            "give 2 workers or more",
        )
    address = parse_address(args.out)
    out = [str(args.out.with_suffix("")), "--file", str(args.out)]
    if address:
        out = [str(address).removesuffix(".json")]
    words = ["launch", FUNCTION, "--min", str(workers)]
    words += option_words(args, "workers", "hosts", "host", "ssh")
    words += ["--out", *out]
    return run_command([*words, "--sizes", ",".join(map(str, sizes))])


def parse_sizes(text: str) -> list[int]:
    """Return the bytes in "1 KiB, 4 MiB". UsageError with the value that is none."""
    try:
        sizes = [parse_bytes(word) for word in text.split(",")]
        if out_of_range := [size for size in sizes if not 1 <= size <= MAX_BYTES]:
            raise ValueError(f"{out_of_range[0]:,} bytes is not from 1 B to 16 GiB")
    except ValueError as error:
        raise UsageError(
            f"--sizes {text!r}: {error}",
            "command line",
            'separate sizes by commas: --sizes "1 KiB, 1 MiB"',
        ) from None
    return sizes
