"""Save a checkpoint in a process that cannot start threads: `save_without_threads.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from loop_habits import refuse_threads

from lockstep.checkpoint.async_save import AsyncSaver
from lockstep.checkpoint.store import CheckpointStore

if __name__ == "__main__":
    with AsyncSaver(CheckpointStore(Path(sys.argv[1]))) as saver:
        refuse_threads()
        saver.save(1, {"weight": torch.ones(3)}, {})
