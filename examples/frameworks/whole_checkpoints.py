"""Whole checkpoints of a transformers Trainer: marked, found, and saved when a signal stops the run.

Trainer writes a checkpoint file by file, and takes the folder with the highest number at a resume.
A process that is killed meanwhile leaves a folder that cannot be loaded, or one that loads without
the optimizer or the random numbers.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

MARKER = "COMPLETE"


class WholeCheckpoints(TrainerCallback):
    """Marks each checkpoint once all processes have written their files. After SIGTERM, all
    processes save at the same step and return from `train`. Use save_total_limit >= 2."""

    def __init__(self) -> None:
        self.is_stopped = False
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_: Any) -> None:
        self.is_stopped = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        stopped = torch.tensor(int(self.is_stopped), device=args.device)
        if dist.is_initialized():
            dist.all_reduce(stopped, dist.ReduceOp.MAX)
        if stopped:
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if dist.is_initialized():
            dist.barrier()
        if state.is_world_process_zero:
            Path(str(args.output_dir), f"checkpoint-{state.global_step}", MARKER).touch()


def newest(folder: str) -> str | None:
    """Return the newest whole checkpoint in the output folder; None if there is none."""
    checkpoints = [marker.parent for marker in Path(folder).glob(f"checkpoint-*/{MARKER}")]
    by_step = {int(path.name.partition("-")[2]): str(path) for path in checkpoints}
    return by_step[max(by_step)] if by_step else None
