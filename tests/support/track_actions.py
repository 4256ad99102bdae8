"""Perform actions on a Tracker in a process that a test can kill: `track_actions.py FOLDER`.

Standard input has one line of JSON: [options of the Tracker, "ACTION NUMBER ..., ACTION, ..."].
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path

import psutil

from lockstep.record.tracker import Tracker


def perform(tracker: Tracker, action: str, *arguments: int) -> None:
    if action == "steps":
        for step in range(arguments[0], arguments[1] + 1):
            tracker.step(step, {"loss": 1 / step, "tokens": 10 * step, "seconds": 0.5})
    elif action == "evaluate":
        with open(tracker.folder / "evaluations.jsonl", "a") as file:
            file.write(
                json.dumps({"step": arguments[0], "bleu": arguments[0] / 2, "signature": "nrefs:1"})
                + "\n"
            )
        tracker.forward_evaluations()
    elif action == "sync":
        tracker.sync()
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "kill-wandb":
        for child in psutil.Process().children():
            child.kill()
            child.wait()
    elif action == "limit":
        size = arguments[0] if arguments else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    elif action == "wait":
        print("ready", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    options, actions = json.loads(sys.stdin.readline())
    tracker = Tracker(Path(sys.argv[1]), leader=True, **options)
    for words in actions.split(", "):
        action, *numbers = words.split()
        perform(tracker, action, *map(int, numbers))
    tracker.close()
    print("closed")
