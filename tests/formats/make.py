"""Keep small run folders of this version: a recipe's and a Session's, in tests/formats/VERSION.tar.gz.

    python tests/formats/make.py [FOLDER]

`tests/distributed/test_formats.py` opens each archive with every later version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import lockstep

HERE = Path(__file__).parent
RECIPE = {
    "data.pairs": 40, "data.held_out": 2, "tokenizer.vocab_size": 300, "tokenizer.kind": "word", "model.dim": 8, "model.n_heads": 1,
    "model.ffn_dim": 8, "model.encoder_layers": 1, "model.decoder_layers": 1, "batch.micro_batches": 2, "batch.tokens": 128,
    "batch.buckets": 1, "optim.warmup_steps": 1, "optim.decay_steps": 100, "compute.precision": "fp32", "checkpoint.keep": 1,
    "evaluate.at_end": 0,
}  # fmt: skip
LOOP = """import torch
from torch.utils.data import TensorDataset

import lockstep


def main(out: str = "session", steps: int = 4) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    dataset, model = TensorDataset(inputs, inputs.sin()), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lockstep.Session(out, micro_batches=2, save_every=2, keep=1) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=8)
        for step in session.steps(steps):
            for x, y in loader(step):
                session.backward((model(x) - y).square().mean())
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
"""


def run(folder: Path, *words: object) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_TMP": str(folder)}
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environ, check=True, capture_output=True, text=True
    ).stdout


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "loop.py").write_text(LOOP)
        run(
            folder,
            "train",
            "--workers",
            2,
            "--steps",
            4,
            "--out",
            "recipe",
            *(word for item in RECIPE.items() for word in (f"--{item[0]}", item[1])),
        )
        run(folder, "run", "loop.py", "--workers", 2)
        digests = {
            name: run(folder, "checkpoint", "digest", name).strip()
            for name in ("recipe", "session")
        }
        (folder / "digests.json").write_text(json.dumps(digests, indent=1))
        path = out / f"{lockstep.__version__}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in ("digests.json", "loop.py", "recipe", "session"):
                archive.add(folder / name, name, filter=without_owner)
    print(f"{path}: {path.stat().st_size:,} bytes")


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Drop names of this machine's users, and the secret token, which a start creates again."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if entry.name.endswith("/token") else entry


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
