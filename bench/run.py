"""make bench: races Lockstep against others on this machine and prints what came of each claim.

python bench/run.py                       the small races, about four minutes on two cores
python bench/run.py --full                all of them, at the sizes that the claims are about
python bench/run.py bare-base-4           one by name
python bench/run.py --full --keep speed   write bench/DATE-speed/{command,machine,raw.jsonl,README.md} besides
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import psutil
import torch
from contests import HERE, SMALL, Claim, Contestant, Race, races
from group import WORKERS, Answer, start

from lockstep.config.resolve import resolve
from lockstep.config.schema import ResolvedRun
from lockstep.data.pairs.prepare import prepare

LIMIT_S = 1200.0


@dataclass(frozen=True)
class Result:
    """What became of a claim: the ratio of each repetition, and the median of the rates or step times themselves."""

    race: str
    claim: Claim
    ratios: list[float]
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def main() -> int:
    """Run the races that were asked for; 0 when all of them could be run, whatever came out."""
    args = arguments()
    precision, reason = faster_precision()
    asked = [race for race in races(full=args.full, precision=precision) if race.name in args.names]
    print(f"{WORKERS} processes, one thread each; {reason}", flush=True)
    raw: list[dict[str, object]] = []
    results: list[Result] = []
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        for race in asked:
            answers = run_race(race, Path(folder), raw, args.repetitions or race.repetitions)
            results += [judge(race, claim, answers) for claim in race.claims]
    table = "\n".join(rows(results))
    print(f"\n{table}")
    if args.keep:
        print(f"\nkept in {keep(args.keep, raw, table, machine(reason, load_before))}")
    return 0


def arguments() -> argparse.Namespace:
    """What was asked for; `names` is never empty."""
    known = [race.name for race in races(full=True, precision="fp32")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(known)} (default: {', '.join(SMALL)}; --full: all)")
    parser.add_argument("--full", action="store_true", help="the sizes that the claims are about")
    parser.add_argument("--repetitions", type=int, help="instead of each race's own number")
    parser.add_argument("--keep", metavar="NAME", help="write the raw numbers to bench/DATE-NAME")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no race {unknown[0]!r}; there are {', '.join(known)}")
    if args.keep and (folder := kept_folder(args.keep)).exists():
        parser.error(f"{folder} is there already; give another name")
    args.names = args.names or (known if args.full else list(SMALL))
    return args


def faster_precision() -> tuple[str, str]:
    """bf16 or fp32, whichever this processor multiplies faster, and the measurement as the reason.

    bf16 is fast where the processor has units for it (AMX); elsewhere it is emulated, several times slower than fp32.
    """
    torch.set_num_threads(1)
    speed = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.randn(1024, 512).to(dtype), torch.randn(512, 512).to(dtype)
        took_s = []
        for _ in range(20):
            begin = time.perf_counter()
            a @ b
            took_s.append(time.perf_counter() - begin)
        speed[name] = 2 * 1024 * 512 * 512 / median(took_s[5:]) / 1e9
    chosen = max(speed, key=lambda name: speed[name])
    return chosen, f"{chosen}, as one core multiplies {speed['fp32']:.0f} GFLOP/s in fp32 and {speed['bf16']:.0f} in bf16"


def run_race(race: Race, folder: Path, raw: list[dict[str, object]], repetitions: int) -> dict[str, list[Answer]]:
    """The answers of each contestant, one a repetition; each is added to `raw` as it comes."""
    data = prepared(resolve(race.file, race.flags), folder)
    answers: dict[str, list[Answer]] = {one.name: [] for one in race.contestants}
    for repetition in range(repetitions):
        for one in race.contestants:
            flags = race.flags | one.flags | {"steps": str(one.steps or race.steps)}
            place = folder / f"{race.name}-{repetition}-{one.name.replace(' ', '-')}"
            begin = time.perf_counter()
            answer = start(one, resolve(race.file, flags), data, place, race.environ, LIMIT_S)
            answers[one.name].append(answer)
            raw.append({"race": race.name, "contestant": one.name, "repetition": repetition, "flags": flags, **answer.json()})
            shutil.rmtree(place)  # made by `start` for this one answer; holds a checkpoint of up to 600 MB
            print(line(race, one, repetition, answer, time.perf_counter() - begin), flush=True)
    return answers


def line(race: Race, one: Contestant, repetition: int, answer: Answer, all_s: float) -> str:
    """One start on the screen."""
    warm = warmup(race, one)
    seconds = answer.seconds[warm:]
    rate = sum(answer.tokens[warm:]) / sum(seconds)
    name = f"{race.name:<16} {repetition + 1}  {one.name:<17}"
    return f"{name} {rate:>8.0f} tokens/s  step {median(seconds):.3f} s  {len(seconds)} steps  ({all_s:.0f} s in all)"


def prepared(resolved: ResolvedRun, folder: Path) -> Path:
    """The corpus of the run, prepared once for all who race over it."""
    key = f"data-{abs(hash((resolved.run.data, resolved.run.tokenizer)))}"
    prepare(resolved.run.data, resolved.run.tokenizer, folder / key)
    return folder / key


def warmup(race: Race, contestant: Contestant) -> int:
    return contestant.warmup or race.warmup


def judge(race: Race, claim: Claim, answers: dict[str, list[Answer]]) -> Result:
    """The ratio of each repetition.

    rates      what was trained over the seconds it took, warm-up left out
    step time  the same micro-batches on both sides, so step is compared with step: the median of their ratios
    """
    warm = {one.name: warmup(race, one) for one in race.contestants}
    ratios, ours, theirs = [], [], []
    for a, b in zip(answers[claim.ours], answers[claim.theirs], strict=True):
        if claim.unit == "step time":
            first = warm[claim.ours]
            ratios.append(median(x / y for x, y in zip(a.seconds[first:], b.seconds[first:], strict=True)))
            ours.append(median(a.seconds[first:]))
            theirs.append(median(b.seconds[first:]))
        else:
            x, y = rate(a, claim, warm[claim.ours]), rate(b, claim, warm[claim.theirs])
            ratios.append(x / y)
            ours.append(x)
            theirs.append(y)
    return Result(race.name, claim, ratios, median(ours), median(theirs))


def rate(answer: Answer, claim: Claim, warm: int) -> float:
    """Pairs or real target tokens a second."""
    counts = answer.pairs if claim.unit == "pairs a second" else answer.tokens
    return sum(counts[warm:]) / sum(answer.seconds[warm:])


def rows(results: list[Result]) -> Iterator[str]:
    """The table, as Markdown that is also readable on a terminal."""
    yield row("race", "ratio of", "ours", "theirs", "ratio", "lowest to highest", "bound", "met")
    yield row("---", "---", "---:", "---:", "---:", "---", "---", "---")
    for result in results:
        claim = result.claim
        sign = "<=" if claim.unit == "step time" else ">="
        bound = f"{sign} {claim.bound:g}" + (f", goal {claim.goal:g}" if claim.goal else "")
        spread = f"{min(result.ratios):.3g} to {max(result.ratios):.3g}"
        what = f"{claim.unit}, {claim.ours} / {claim.theirs}"
        met = "yes" if claim.met(result.ratio) else "no"
        yield row(result.race, what, f"{result.ours:.4g}", f"{result.theirs:.4g}", f"{result.ratio:.3g}", spread, bound, met)


def row(race: str, what: str, ours: str, theirs: str, ratio: str, spread: str, bound: str, met: str) -> str:
    return f"| {race:<15} | {what:<43} | {ours:>7} | {theirs:>7} | {ratio:>6} | {spread:<17} | {bound:<16} | {met:<3} |"


def machine(precision: str, load_before: tuple[float, float, float]) -> str:
    """What the numbers were taken on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    field = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    matrix_units = [flag for flag in field.get("flags", "").split() if flag.startswith(("amx", "avx512_bf16", "avx512f", "avx2"))]

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


def kept_folder(name: str) -> Path:
    return HERE / f"{datetime.date.today().isoformat()}-{name}"


def keep(name: str, raw: Iterable[Mapping[str, object]], table: str, about: str) -> Path:
    """Write the folder of a measurement by the script that runs."""
    folder = kept_folder(name)
    folder.mkdir()
    threads = f"OMP_NUM_THREADS={number} " if (number := os.environ.get("OMP_NUM_THREADS")) else ""
    (folder / "command").write_text(f"{threads}python bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}\n")
    (folder / "machine").write_text(about)
    (folder / "raw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in raw))
    how = "How each is measured: [bench/README.md](../README.md)."
    (folder / "README.md").write_text(f"# {folder.name}\n\n```\n{about}```\n\n{table}\n\n{how}\n")
    return folder


if __name__ == "__main__":
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    raise SystemExit(main())
