"""Score the checkpoints of examples/own_loop.py while it trains, here or on another machine.

    lockstep run examples/own_loop.py --steps 4000
    python examples/evaluate_checkpoints.py runs/own --last 4000    wherever RUN is mounted

Training does not wait for this program. It can be killed and started again at any time: it scores
each checkpoint once, and a checkpoint that is deleted meanwhile not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from own_loop import make_model  # type: ignore[import-not-found]  # beside this file
from safetensors.torch import load
from torch import Tensor, nn

POLL_S = 1.0


# --8<-- [start:read]
def committed_steps(run: Path) -> list[int]:
    """Return the steps whose checkpoint is complete: its folder has the file COMMITTED."""
    found = run.glob("checkpoints/step-*[0-9]/COMMITTED")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def read_weights(run: Path, step: int) -> dict[str, Tensor] | None:
    """Return the weights of a checkpoint; None if it is gone or damaged.

    The command holds a lock, so that retention keeps what it reads. It compares every byte with its
    hash, and writes the file as a whole or not at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        words = ["checkpoint", "export", str(run), str(step), "--out", str(file)]
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *words], stdout=subprocess.DEVNULL, check=False
        )
        return None if done.returncode else load(file.read_bytes())


# --8<-- [end:read]


@torch.inference_mode()
def score(model: nn.Module) -> float:
    """Return the mean squared error on houses that training has not seen."""
    sizes = torch.rand(500, 2, generator=torch.Generator().manual_seed(8)) * 6
    prices = sizes @ torch.tensor([0.773, 0.321]) + 0.067
    model.eval()
    return float(nn.functional.mse_loss(model(sizes), prices))


def follow(run: Path, last: int, out: Path) -> None:
    """Score each new checkpoint until that of step `last`; write {step: score} into `out`."""
    scores = json.loads(out.read_text()) if out.exists() else {}
    tried = {int(step) for step in scores}
    model = make_model()
    while last not in tried:
        pending = [step for step in committed_steps(run) if step not in tried]
        if not pending:
            time.sleep(POLL_S)
            continue
        step = pending[0]  # retention deletes the oldest first
        tried.add(step)
        if (weights := read_weights(run, step)) is None:
            continue
        model.load_state_dict(weights)
        scores[str(step)] = score(model)
        print(f"step {step}  held-out loss {scores[str(step)]:.5f}", flush=True)
        new = out.with_name(f".{out.name}.{os.getpid()}")
        new.write_text(json.dumps(scores, indent=1))
        new.replace(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--last", type=int, required=True, help="the last step of the run")
    parser.add_argument("--out", type=Path, help="default: RUN/scores.json")
    args = parser.parse_args()
    follow(args.run, args.last, args.out or args.run / "scores.json")
