"""Keep the raw numbers of a measurement: bench/SUBJECT/DATE-NAME with command, machine, raw.jsonl and README.md."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

TOP = Path(__file__).parents[1]
HOW = "How each is measured: [bench/README.md](../../README.md)."


def machine(precision: str, load_before: tuple[float, float, float]) -> str:
    """Describe the machine, the packages and the load."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    field = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    matrix_units = [
        flag
        for flag in field.get("flags", "").split()
        if flag.startswith(("amx", "avx512_bf16", "avx512f", "avx2"))
    ]

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    packages = ("torch", "numpy", "tokenizers", "accelerate", "lightning-fabric", "transformers")
    return "\n".join(
        [
            f"processor    {field.get('model name', platform.processor())}, {psutil.cpu_count()} cores, {' '.join(matrix_units)}",
            f"memory       {psutil.virtual_memory().total / 2**30:.0f} GiB",
            f"system       {platform.platform()}, Python {platform.python_version()}",
            f"packages     {', '.join(f'{name} {installed(name)}' for name in packages)}",
            f"precision    {precision}",
            f"load         {load_before[0]:.2f} before, {os.getloadavg()[0]:.2f} after (one-minute averages)",
            "",
        ]
    )


def result_folder(name: str) -> Path:
    """Return bench/SUBJECT/DATE-NAME; SUBJECT is the folder of the running script."""
    today = datetime.date.today().isoformat()
    return Path(sys.argv[0]).resolve().parent / f"{today}-{name}"


def command_line() -> str:
    """Return the command that started this measurement."""
    threads = f"OMP_NUM_THREADS={number} " if (number := os.environ.get("OMP_NUM_THREADS")) else ""
    module = ".".join(Path(sys.argv[0]).resolve().relative_to(TOP).with_suffix("").parts)
    return f"{threads}python -m {module} {' '.join(sys.argv[1:])}\n"


def keep(name: str, raw: Iterable[Mapping[str, object]], table: str, about: str) -> Path:
    """Write the folder of a measurement and return it."""
    folder = result_folder(name)
    folder.mkdir()
    (folder / "command").write_text(command_line())
    (folder / "machine").write_text(about)
    (folder / "raw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in raw))
    (folder / "README.md").write_text(f"# {folder.name}\n\n```\n{about}```\n\n{table}\n\n{HOW}\n")
    return folder
