"""Race Lockstep's training step against other libraries on this machine, and print the result of each claim.

python -m bench.step.run                       the paired rounds, twelve minutes on two cores (make bench)
python -m bench.step.run paired-512-bf16-4     one cell of them, or one race, by name
python -m bench.step.run --full                all races, at the sizes of the claims
python -m bench.step.run --full --keep NAME    keep bench/step/DATE-NAME/{command,machine,raw.jsonl,README.md}
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from bench.results import keep, machine, result_folder
from bench.step.contestants import WORKERS, Answer, start
from bench.step.contests import Claim, Contestant, Race, races
from bench.step.paired import CELLS, rows_of_cells, run_cell
from lockstep.config.resolve import resolve
from lockstep.config.schema import ResolvedRun
from lockstep.corpus.encoded_pairs import prepare

LIMIT_S = 1200.0


@dataclass(frozen=True)
class Result:
    """The result of a claim: the ratio of each repetition, and the medians of the rates or step times."""

    race: str
    claim: Claim
    ratios: list[float]
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def main() -> int:
    """Run the requested races; return 0 if all of them ran, for any result."""
    args = arguments()
    precision, reason = faster_precision()
    asked = [race for race in races(full=args.full, precision=precision) if race.name in args.names]
    print(f"{WORKERS} processes, one thread each; {reason}", flush=True)
    raw: list[dict[str, object]] = []
    results: list[Result] = []
    load_before = os.getloadavg()
    cells: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        for name in args.names:
            if name in CELLS:
                pairs = run_cell(CELLS[name], Path(folder), args.seconds, LIMIT_S)
                print("\n".join(rows_of_cells(pairs)), flush=True)
                cells += pairs
        for race in asked:
            answers = run_race(race, Path(folder), raw, args.repetitions or race.repetitions)
            results += [judge(race, claim, answers) for claim in race.claims]
    table = "\n".join(
        [*(rows_of_cells(cells) if cells else ()), *(rows(results) if results else ())]
    )
    print(f"\n{table}")
    if args.keep:
        print(f"\nkept in {keep(args.keep, cells + raw, table, machine(reason, load_before))}")
    return 0


def arguments() -> argparse.Namespace:
    """Parse the command line; `names` is never empty."""
    of_claims = [race.name for race in races(full=True, precision="fp32")]
    known = [*CELLS, *of_claims]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(known)} (default: paired-*; --full: the others)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=50.0,
        help="of a paired cell in the mean, its first steps included",
    )
    parser.add_argument("--full", action="store_true", help="the sizes that the claims are about")
    parser.add_argument("--repetitions", type=int, help="instead of each race's own number")
    parser.add_argument("--keep", metavar="NAME", help="write the raw numbers to bench/DATE-NAME")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no race {unknown[0]!r}; there are {', '.join(known)}")
    if args.keep and (folder := result_folder(args.keep)).exists():
        parser.error(f"{folder} exists; give another name")
    args.names = args.names or (of_claims if args.full else list(CELLS))
    return args


def faster_precision() -> tuple[str, str]:
    """Return the precision that this processor multiplies faster, and the measurement as the reason.

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
    return (
        chosen,
        f"{chosen}, as one core multiplies {speed['fp32']:.0f} GFLOP/s in fp32 and {speed['bf16']:.0f} in bf16",
    )


def run_race(
    race: Race, folder: Path, raw: list[dict[str, object]], repetitions: int
) -> dict[str, list[Answer]]:
    """Return the answers of each contestant, one per repetition, and append each to `raw`."""
    data = prepared(resolve(race.file, race.flags), folder)
    answers: dict[str, list[Answer]] = {one.name: [] for one in race.contestants}
    for repetition in range(repetitions):
        for one in race.contestants:
            flags = race.flags | one.flags | {"steps": str(one.steps or race.steps)}
            place = folder / f"{race.name}-{repetition}-{one.name.replace(' ', '-')}"
            begin = time.perf_counter()
            answer = start(one, resolve(race.file, flags), data, place, race.environ, LIMIT_S)
            answers[one.name].append(answer)
            raw.append(
                {
                    "race": race.name,
                    "contestant": one.name,
                    "repetition": repetition,
                    "flags": flags,
                    **answer.json(),
                }
            )
            shutil.rmtree(
                place
            )  # made by `start` for this one answer; holds a checkpoint of up to 600 MB
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
    """Prepare the corpus of the run once, for all contestants."""
    key = f"data-{abs(hash((resolved.run.data, resolved.run.tokenizer)))}"
    prepare(resolved.run.data, resolved.run.tokenizer, folder / key)
    return folder / key


def warmup(race: Race, contestant: Contestant) -> int:
    return contestant.warmup or race.warmup


def judge(race: Race, claim: Claim, answers: dict[str, list[Answer]]) -> Result:
    """The ratio of each repetition.

    rates      tokens or pairs per second, without the warm-up
    step time  the same micro-batches on both sides, so step is compared with step: the median of their ratios
    """
    warm = {one.name: warmup(race, one) for one in race.contestants}
    ratios, ours, theirs = [], [], []
    for a, b in zip(answers[claim.ours], answers[claim.theirs], strict=True):
        if claim.unit == "step time":
            first = warm[claim.ours]
            ratios.append(
                median(x / y for x, y in zip(a.seconds[first:], b.seconds[first:], strict=True))
            )
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
        yield row(
            result.race,
            what,
            f"{result.ours:.4g}",
            f"{result.theirs:.4g}",
            f"{result.ratio:.3g}",
            spread,
            bound,
            met,
        )


def row(
    race: str, what: str, ours: str, theirs: str, ratio: str, spread: str, bound: str, met: str
) -> str:
    return f"| {race:<15} | {what:<43} | {ours:>7} | {theirs:>7} | {ratio:>6} | {spread:<17} | {bound:<16} | {met:<3} |"


if __name__ == "__main__":
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    raise SystemExit(main())
