"""Save checkpoints in an object store without torch, in a second: a real mirror of a tiny child process.

Run: stored_writer.py ADDRESS STEPS PAUSE_S. Every third step has a checkpoint.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from unittest import mock

from support import checkpoints

from lockstep import log
from lockstep.checkpoint.folder import committed_steps
from lockstep.cli import remote
from lockstep.errors import LockstepError
from lockstep.object_store.address import parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.upload import Mirror
from lockstep.remote.working_copy import owned_copy

CHILD = "import sys; from support.stored_writer import write; write(*sys.argv[3:])"
EVERY = 3
FILES = [f"tensors-{number:05d}.safetensors" for number in range(3)]


def write(folder: str, steps: str, pause_s: str) -> None:
    """As a training: resume from the newest checkpoint, and save until the last step."""
    saved = committed_steps(Path(folder) / "checkpoints")
    print(
        f"resumes from step {saved[-1]}" if saved else "starts from step 0",
        file=sys.stderr,
        flush=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    for step in range(max(saved, default=0) + 1, int(steps) + 1):
        time.sleep(float(pause_s))
        with open(Path(folder) / "metrics.jsonl", "a") as file:
            file.write(f'{{"step": {step}}}\n')
        if step % EVERY == 0:
            checkpoints.save(Path(folder) / "checkpoints", step, FILES)


def main(address: str, *arguments: str) -> int:
    log.set_up_logging()
    run = parse_address(address)
    assert run
    # Nothing trains here, and other tests may use all processors.
    patches = mock.patch.multiple(remote, CHILD=CHILD, LOW_PRIORITY=0)
    try:
        with owned_copy(RunBucket(run), "here") as (copy, ownership), patches:
            return remote.run_mirrored(
                Mirror(copy, ownership), [str(copy), *arguments], signal.SIGTERM
            )
    except LockstepError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
