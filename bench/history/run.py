"""Whether replays equal the record, differences are found, and bad samples are named.

python -m bench.history.run replays --count 50     random steps of recipes, scripts and layouts
python -m bench.history.run mutants                 changes of one line; pairs of equal runs
python -m bench.history.run samples --count 20      a bad sample each
... --work FOLDER --keep NAME                       runs to use again; bench/history/DATE-NAME/
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.results import TOP, keep, machine
from lockstep.data.order import UniformOrder
from lockstep.history.diff import first_difference

GALLERY = TOP / "examples" / "gallery"
SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py"))
STEPS, SAVE_EVERY = 24, 6
PRETRAIN = (str(TOP / "recipes" / "llama-pretrain.toml"),)
Row = dict[str, Any]


def lockstep(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TOP / "src")}
    options: dict[str, Any] = {"cwd": cwd, "env": environ, "capture_output": True, "text": True}
    return subprocess.run(command, check=False, **options)


def train(out: Path, *words: object, cwd: Path) -> Path:
    """Train a run in `out`, unless it is there."""
    if not out.exists():
        result = lockstep(*words, cwd=cwd)
        if result.returncode:
            raise SystemExit(f"{words}:\n{result.stderr}")
    return out


def script_run(
    work: Path, name: str, out: str, *options: object, script: Path | None = None, **flags: object
) -> Path:
    flags = {"steps": STEPS, "save_every": SAVE_EVERY, **flags}
    words = [f"--{flag}={value}" for flag, value in flags.items()]
    file = script or GALLERY / f"{name}.py"
    return train(work / out, "run", *options, "--out", work / out, file, "--", *words, cwd=work)


def recipe_run(work: Path, out: str, *words: object) -> Path:
    counts = ("--steps", STEPS, "--checkpoint.every_steps", SAVE_EVERY)
    return train(work / out, "train", *words, "--out", work / out, *counts, cwd=work)


def many_runs(work: Path) -> Iterator[Path]:
    """Yield runs of each script, recipe and layout; one whose worker is killed."""
    for number, name in enumerate(SCRIPTS):
        yield script_run(work, name, name, "--workers", 1 + number % 3)
    for name in ("gpt", "muon", "diffusion"):
        shards = ("--workers", 2, "--layout.shard", 2)
        yield script_run(work, name, f"{name}-shards", *shards)
    yield recipe_run(work, "translate", "--workers", 2)
    yield recipe_run(work, "pretrain", *PRETRAIN, "--workers", 2)
    yield recipe_run(work, "pretrain-shards", *PRETRAIN, "--workers", 2, "--layout.shard", 2)
    yield recipe_run(work, "pretrain-tensor", *PRETRAIN, "--workers", 2, "--layout.tensor", 2)
    yield recipe_run(work, "translate-stages", "--workers", 2, "--layout.pipeline", 2)
    yield recipe_run(work, "learners", "--workers", 2, "--diloco.learners", 2, "--diloco.every", 1)
    disturbed = work / "disturbed"
    if not disturbed.exists():
        disturbed.mkdir()
        (disturbed / "disturb").write_text(json.dumps({"kill": 7, "stop": 15}))
        loop = f"{TOP / 'tests' / 'support' / 'loops' / 'session.py'}:train"
        words = ("train", loop, "--out", disturbed, f"--steps={STEPS}", "--workers")
        assert lockstep(*words, 3, cwd=work).returncode == 75
        assert lockstep(*words, 2, cwd=work).returncode == 0
    yield disturbed


def replays(work: Path, count: int) -> list[Row]:
    runs, chance, rows = list(many_runs(work)), random.Random(1), list[Row]()
    for number in range(count):
        run, step = runs[number % len(runs)], chance.randint(1, STEPS)
        result = lockstep("replay", run, "--step", step, "--from-start", cwd=work)
        row = {"run": run.name, "step": step, "equal": result.returncode == 0}
        rows.append(row | {"said": result.stdout.strip() or result.stderr.strip()})
        print(json.dumps(rows[-1]), flush=True)
    return rows


# Changes of one line: script, text, changed text, what `lockstep diff` must say.
FIRST = "step 1, micro-batch 0: "
UPDATE = "step 1: the update of "
CHANGES = [
    ("gpt", "nn.GELU()", "nn.GELU('tanh')", FIRST + "blocks.0.mlp.1 output"),
    ("gpt", "nn.Dropout(0.1)", "nn.Dropout(0.11)", FIRST + "blocks.0.mlp.3 output"),
    ("gpt", "is_causal=True", "is_causal=False", FIRST + "blocks.0, which .* blocks.0.projection"),
    ("gpt", "self.norm2(x)", "self.norm2(2 * x)", FIRST + "blocks.0, which .* blocks.0.norm2"),
    ("gpt", "outputs: Tensor = x", "outputs: Tensor = 1.001 * x", FIRST + "blocks.0 output"),
    ("gpt", "x = x + self.proj", "x = 1.5 * x + self.proj", FIRST + "blocks.0, .* blocks.0.norm2"),
    ("gpt", "self.norm(self.blocks(x))", "self.norm(2 * self.blocks(x))", FIRST + "the model, .* norm"),
    ("gpt", "self.norm1(x))", "self.norm1(x + 1))", FIRST + "blocks.0, which .* blocks.0.norm1"),
    ("gpt", "targets.flatten())", "targets.flatten(), label_smoothing=0.1)", FIRST + "the model out"),
    ("gpt", "lr=3e-3", "lr=3.001e-3", UPDATE),
    ("gpt", "betas=(0.9, 0.95)", "betas=(0.91, 0.95)", "step [12]: the update of "),
    ("gpt", '"weight_decay": 0.1', '"weight_decay": 0.2', UPDATE),
    ("gpt", "session.clip_grad_norm_(1.0)", "session.clip_grad_norm_(0.1)", UPDATE),
    (
        "gpt",
        "session.clip_grad_norm_(1.0)",
        "session.clip_grad_norm_(1.0 if step < 3 else 0.1)",
        "step 4: the update of ",
    ),
    (
        "gpt",
        "session.backward(model(ids, targets))",
        "session.backward(model(ids, targets) * (1 if step < 2 else 1.01))",
        "step 3, micro-batch 0: the loss",
    ),
    ("gpt", "rd(model(ids, targets))", "rd(1.01 * model(ids, targets))", FIRST + "the loss"),
    ("gpt", "LENGTH // 2 - 1] = -100", "LENGTH // 2 - 2] = -100", FIRST + "the data"),
    ("gpt", "manual_seed(1)", "manual_seed(2)", FIRST + "the data"),
    ("gpt", "manual_seed(0)", "manual_seed(3)", "step 1: the weights before it"),
    ("gpt", "save_every=save_every)", "save_every=save_every, seed=1)", FIRST + "the data"),
    ("image_classifier", "nn.AvgPool2d(2)", "nn.MaxPool2d(2)", FIRST + "6 output"),
    ("image_classifier", "smoothing=0.1", "smoothing=0.11", FIRST + "the loss"),
    ("image_classifier", "momentum=0.9", "momentum=0.8", "step 2: the update of "),
    ("image_classifier", "T_max=60", "T_max=50", "step 2: the update of "),
    ("image_classifier", "padding: int = 2", "padding: int = 1", FIRST + "the data"),
    ("image_classifier", "< 0.5 else image", "< 0.4 else image", "step ., micro-batch .: the data"),
    ("diffusion", "(1 - time).sqrt()", "(1 - time)", FIRST + "the model, .* layers"),
    ("diffusion", "nn.SiLU(), nn.Linear(64, 2)", "nn.GELU(), nn.Linear(64, 2)", FIRST + "layers.3"),
    ("diffusion", "torch.randn_like(points)", "torch.rand_like(points)", FIRST + "the model, "),
    ("gan", "nn.LeakyReLU(0.2)", "nn.LeakyReLU(0.1)", FIRST + "discriminator.1 output"),
    ("gan", "lr=1e-3", "lr=2e-3", UPDATE + "generator"),
    ("muon", "torch.optim.Muon(matrices, lr=0.02)", "torch.optim.Muon(matrices, lr=0.03)", UPDATE),
    ("muon", "mse_loss(model(rows), targets))", "mse_loss(model(rows), 2 * targets))", FIRST + "the loss"),
]  # fmt: skip


def mutants(work: Path, count: int) -> list[Row]:
    rows = []
    for number, (name, text, changed, expected) in enumerate(CHANGES[:count]):
        base = script_run(work, name, f"{name}-base", "--workers", 1, steps=6, save_every=2)
        folder = work / f"mutant-{number}"
        folder.mkdir(exist_ok=True)
        source = (GALLERY / f"{name}.py").read_text()
        assert text in source, (name, text)
        (folder / f"{name}.py").write_text(source.replace(text, changed))
        run = script_run(
            folder, name, "run", "--workers", 1, script=folder / f"{name}.py", steps=6, save_every=2
        )
        result = lockstep("diff", base, run, cwd=work)
        place = re.search(f"they part in {expected}", result.stdout)
        found = result.returncode == 1 and place is not None
        said = result.stdout.splitlines()[-3:]
        rows.append({"script": name, "changed": changed, "found": found, "said": said})
        print(json.dumps(rows[-1]), flush=True)
    return rows + unchanged(work)


def unchanged(work: Path) -> list[Row]:
    """Compare all pairs of 15 runs of one script: on 1 to 3 workers, some stopped and resumed."""
    runs = []
    for number in range(15):
        workers = ("--workers", 1 + number % 3)
        if number % 2:
            script_run(work, "gpt", f"same-{number}", *workers, steps=8, save_every=3)
        out = work / f"same-{number}"
        again = lockstep(
            "run",
            *workers,
            "--out",
            out,
            GALLERY / "gpt.py",
            "--",
            "--steps=12",
            "--save_every=3",
            cwd=work,
        )
        assert again.returncode == 0, again.stderr
        runs.append(out)
    rows = []
    for a, b in itertools.combinations(runs, 2):
        last, step, what = first_difference(a, b)
        rows.append({"pair": [a.name, b.name], "alarm": bool(step), "said": what, "steps": last})
    return rows


BAD = """
class Bad(Sorting):
    def __init__(self) -> None:
        super().__init__()
        self.rows[{bad}, LENGTH // 2 :] = self.rows[{bad}, LENGTH // 2 :].flip(0)


Sorting = Bad


"""


def samples(work: Path, count: int) -> list[Row]:
    """Turn the answer of one sample around; ask why a late step with it has its loss."""
    chance, rows = random.Random(2), list[Row]()
    order = UniformOrder(240, batch_size=24, micro_batches=6, seed=0)
    source = (GALLERY / "gpt.py").read_text()
    for number in range(count):
        bad = chance.randrange(240)
        folder = work / f"bad-{number}"
        folder.mkdir(exist_ok=True)
        text = source.replace("def make_optimizer", f"{BAD.format(bad=bad)}def make_optimizer", 1)
        (folder / "gpt.py").write_text(text)
        run = script_run(
            folder, "gpt", "run", "--workers", 1, script=folder / "gpt.py", steps=60, save_every=20
        )
        steps = [s for s in range(45, 60) if bad in {i for k in range(6) for i in order.ids(s, k)}]
        step = steps[0] + 1
        result = lockstep("why", run, "--step", step, cwd=work)
        lines = result.stdout.splitlines()
        at = next((i for i, line in enumerate(lines) if line.startswith("highest")), len(lines) - 2)
        rows.append({"bad": bad, "step": step, "said": lines[at + 1 : at + 2]})
        rows[-1]["named"] = f"samples {bad}," in lines[at + 1]
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[Row]) -> str:
    lines = []
    for key, text in (
        ("equal", "replays equal the record"),
        ("found", "changes located"),
        ("alarm", "unchanged pairs with an alarm"),
        ("named", "bad samples named"),
    ):
        of_kind = [row[key] for row in rows if key in row]
        if of_kind:
            lines.append(f"* {text}: {sum(of_kind)} of {len(of_kind)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[Path, int], list[Row]]] = {
        "replays": replays,
        "mutants": mutants,
        "samples": samples,
    }
    parser.add_argument("part", choices=parts)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--keep", metavar="NAME")
    args = parser.parse_args()
    load = os.getloadavg()
    work = args.work or Path(tempfile.mkdtemp(prefix="bench-history-"))
    work.mkdir(parents=True, exist_ok=True)
    rows = parts[args.part](work.resolve(), args.count)
    if not args.work:
        shutil.rmtree(work)
    shown = table(rows)
    print(shown)
    if args.keep:
        keep(args.keep, rows, shown, machine("fp32, one thread a worker", load))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
