"""Commands whose run folder is in an object store: run them in a copy on this host.

A command that writes runs in the working copy, in a child process, and a thread of this process
mirrors the copy meanwhile. A command that reads runs in a temporary copy of the newest snapshot.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

from lockstep.agent.hosts import read_hosts
from lockstep.checkpoint.folder import folder_name
from lockstep.checkpoint.policy import choose_step
from lockstep.cli import launch
from lockstep.errors import CheckpointError, FencedError, LockstepError, StoreError, UsageError
from lockstep.log import log, printable
from lockstep.object_store.address import Address, parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.download import download, no_run, temporary_copy
from lockstep.remote.host_mirror import HostMirror
from lockstep.remote.snapshots import Snapshot, newest, steps_of
from lockstep.remote.upload import Mirror, StoreTask
from lockstep.remote.working_copy import ended_copy, is_of_several_hosts, joined_copy, owned_copy
from lockstep.runtime.environment import read_rank_info
from lockstep.runtime.processes import PR_SET_PDEATHSIG, die_with_parent, prctl
from lockstep.runtime.signals import EXIT_INTERRUPTED, STOP_EXIT_CODES, STOP_SIGNALS
from lockstep.units import format_bytes

WRITE = ("train", "run", "launch", "evaluate")
HISTORY = ("replay", "diff", "why")
READ = ("checkpoint", "generate", "translate", "report", "plan", *HISTORY)
OPTIONS = ("action", "average", "host", "out", "parent", "show", "step")  # a command may lack them
POLL_S = 0.5
LOW_PRIORITY = 19  # the training goes first
CHILD = (
    "import sys; from lockstep.cli.remote import run_child; "
    "sys.exit(run_child(*map(int, sys.argv[1:3]), sys.argv[3:]))"
)


def run_remote(
    args: argparse.Namespace, words: Sequence[str], addresses: Sequence[Address], rest: list[str]
) -> int:
    """Run the command of `words`, whose run folders are `addresses`; return its exit code.
    args, rest: as parsed from `words`"""
    address = addresses[0]
    args = argparse.Namespace(**dict.fromkeys(OPTIONS) | vars(args))
    refuse_unsupported(args, address)
    if args.command == "status" or isinstance(args.command == "launch" and args.stop, Path):
        return run_beside_training(address, words)
    if (
        args.command == "launch"
        and not args.host
        and (args.ray or args.ssh or (args.hosts and read_hosts(args.hosts).ssh))
    ):
        return launch.main(args, rest)  # each host mirrors its own copy
    if args.show or (args.command in READ and args.action != "import"):
        return run_on_snapshots(args, addresses, words)
    if parent := args.parent:
        die_with_parent(parent)
        words = [
            str(os.getpid()) if before == "--parent" else word
            for before, word in pairwise(["", *words])
        ]
    bucket, host = RunBucket(address), args.host or socket.gethostname()
    if args.command == "launch" and (args.hosts or args.nodes):
        with joined_copy(bucket, host) as (copy, files):
            # If this process is killed, the other hosts continue.
            return run_mirrored(
                HostMirror(copy, bucket, host, files),
                with_folder(words, address, copy),
                signal.SIGUSR1,
            )
    own = ended_copy if args.command == "evaluate" and is_of_several_hosts(bucket) else owned_copy
    with own(bucket, host) as (copy, ownership):
        return run_mirrored(
            Mirror(copy, ownership), with_folder(words, address, copy), signal.SIGTERM
        )


def refuse_unsupported(args: argparse.Namespace, address: Address) -> None:
    """UsageError for what an object store does not support."""
    command, action = args.command, args.action
    out = args.out or ""
    is_agent = command == "launch" and bool(args.hosts or args.nodes)  # srun may start it
    is_started = command in WRITE and not is_agent and read_rank_info(os.environ) is not None
    writes_file = action == "export" or command == "report"
    writer = "checkpoint export" if action == "export" else command
    refused = {
        f"lockstep {command}": (
            command not in (*WRITE, *READ, "status"),
            "give a folder on this host",
        ),
        "a Hugging Face folder": (
            action == "import" and parse_address(args.folder) is not None,
            "copy it to this host",
        ),
        f"{writer} without --out": (
            writes_file and not out,
            "name the file to write with --out FILE",
        ),
        f"{writer} --out s3://": (
            writes_file and parse_address(out) is not None,
            "write to this host, then copy it",
        ),
        "evaluate --follow": (
            command == "evaluate" and args.follow,
            "use lockstep launch --with-evaluator",
        ),
        "a start by torchrun, srun or mpirun": (
            is_started,
            "start lockstep train or launch by itself: it starts the workers of this host",
        ),
    }
    for what, (is_refused, hint) in refused.items():
        if is_refused:
            raise UsageError(f"{what} is not supported in an object store", str(address), hint)


def with_folder(words: Sequence[str], address: Address, folder: Path) -> list[str]:
    """Return `words` with `folder` in place of the address; as --out, when the script named it."""
    replaced = []
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        with suppress(UsageError):
            if value and parse_address(value) == address:
                word = f"{option}{equals}{folder}"
        replaced.append(word)
    return replaced if replaced != list(words) else [words[0], "--out", str(folder), *words[1:]]


# Commands that write.


class MirrorThread(threading.Thread):
    """Mirrors a folder beside the training, until `ended` is set and the rest is uploaded.
    errors: why it has stopped earlier"""

    def __init__(self, mirror: StoreTask) -> None:
        super().__init__(name="mirror", daemon=True)
        self.mirror = mirror
        self.ended = threading.Event()
        self.errors: list[LockstepError] = []

    def run(self) -> None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # a thread that has exited
                os.setpriority(os.PRIO_PROCESS, int(thread), LOW_PRIORITY)
        try:
            while not self.ended.wait(POLL_S):
                self.mirror.poll()
            self.mirror.finish()
        except LockstepError as error:
            self.errors.append(error)
        except BaseException as error:  # this thread never ends without a report
            log.error("the mirror failed", exc_info=error)
            what = f"the mirror failed: {type(error).__name__}: {error}"
            hint = f"the run is in {self.mirror.folder}; report this"
            self.errors.append(StoreError(what, str(self.mirror.bucket.address), hint))


def run_mirrored(mirror: StoreTask, words: Sequence[str], stop_signal: signal.Signals) -> int:
    """Run the command in a child process and mirror its folder; return its exit code.
    stop_signal: for the child, when this process is killed or loses the run."""
    command = [sys.executable, "-c", CHILD, str(os.getpid()), str(int(stop_signal)), *words]
    # Of a separate process group: Ctrl-C reaches it once, from here.
    child = subprocess.Popen(command, process_group=0)
    handlers = {
        number: signal.signal(number, lambda number, frame: child.send_signal(number))
        for number in STOP_SIGNALS
    }
    thread = MirrorThread(mirror)
    thread.start()
    stopped = False
    while child.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
        if thread.errors and not stopped:  # another owner has the run, or nothing mirrors it
            log.error("%s", thread.errors[0].what)
            child.send_signal(stop_signal)
            stopped = True
    for number, handler in handlers.items():
        signal.signal(number, handler)
    thread.ended.set()
    try:
        thread.join()
    except KeyboardInterrupt:
        print(
            f"interrupted: the last files are only in {mirror.folder}; "
            "the same command uploads them",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_INTERRUPTED)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    for error in thread.errors:
        print(error, file=sys.stderr)
        if isinstance(error, FencedError):
            code = error.exit_code
        elif code in STOP_EXIT_CODES.values():  # of a run that is saved
            code = StoreError.exit_code
    return code


def run_child(parent: int, stop_signal: int, words: list[str]) -> int:
    """Run a command of Lockstep. It receives the signal when process `parent` is killed."""
    from lockstep.cli.main import main

    prctl(PR_SET_PDEATHSIG, stop_signal)
    if os.getppid() != parent:
        return 128 + stop_signal
    sys.argv = ["lockstep", *words]
    return main(words)


# Commands that read.


def run_on_snapshots(
    args: argparse.Namespace, addresses: Sequence[Address], words: Sequence[str]
) -> int:
    """Run a command in temporary copies of the newest snapshots; return its exit code."""
    problems: list[str] = []
    with ExitStack() as stack:
        for address in addresses:
            bucket = RunBucket(address)
            snapshot = newest(bucket) if args.command != "plan" or args.measure else None
            if snapshot is None and args.command != "plan":
                raise no_run(address)
            if snapshot and args.action == "list":
                print(printable(list_table(snapshot)))
                return 0
            folder = stack.enter_context(temporary_copy(address))
            if snapshot:
                wanted = wanted_files(args, snapshot, address)
                problems += download(bucket, snapshot, folder, wanted).problems
            words = with_folder(words, address, folder)
        if problems and args.action != "verify":
            raise CheckpointError(
                "the checkpoint is damaged",
                "\n".join(problems),
                f"see lockstep checkpoint verify {addresses[0]}",
            )
        code = subprocess.run([sys.executable, "-m", "lockstep", *words], check=False).returncode
        print(*map(printable, problems), sep="\n", end="\n" * bool(problems))
    if problems:
        return 3
    return code if code >= 0 else 128 - code


def wanted_files(
    args: argparse.Namespace, snapshot: Snapshot, address: Address
) -> Callable[[str], bool]:
    """Return a filter on the files that a command reads."""
    if args.command in HISTORY:
        return lambda path: True
    if args.command in ("report", "plan"):
        return lambda path: not path.endswith(".safetensors")
    steps, step = steps_of(snapshot.files), args.step
    reads_all = step == "best" or args.average
    if args.show:
        steps = []
    elif not reads_all and args.action != "verify":
        steps = [choose_step(step, steps, str(address))]
    names = set(map(folder_name, steps))
    return lambda path: not path.startswith("checkpoints/") or path.split("/")[1] in names


def list_table(snapshot: Snapshot) -> str:
    """Return a table of the checkpoints in a snapshot."""
    head = (
        f"{'step':>12}  {'size':>10}  {'files':>5}  snapshot {snapshot.number}, "
        f"put by {snapshot.host}"
    )
    lines = [head]
    for step in steps_of(snapshot.files):
        folder = f"checkpoints/{folder_name(step)}/"
        files = [blobs for path, blobs in snapshot.files.items() if path.startswith(folder)]
        size = sum(size for blobs in files for _, size in blobs)
        lines.append(f"{step:>12}  {format_bytes(size):>10}  {len(files):>5}")
    return "\n".join(lines)


def run_beside_training(address: Address, words: Sequence[str]) -> int:
    """Run a command that asks the workers, on the host that trains."""
    if not address.working_copy.is_dir():
        snapshot = newest(RunBucket(address))
        raise UsageError(
            f"this host has no working copy of {address}",
            str(address.working_copy),
            f"run it on {snapshot.host}, which trains" if snapshot else "start the run first",
        )
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *with_folder(words, address, address.working_copy)],
        check=False,
    ).returncode
