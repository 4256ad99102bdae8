"""The options of every command. Imports neither torch nor a command."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.errors import UsageError
from lockstep.network.collectives import ALGORITHMS, COLLECTIVES
from lockstep.units import parse_bytes, parse_rate, parse_seconds

EXIT_CODES = """exit codes: 0 success; 1 training failed; 2 usage or configuration; 3 damaged data or checkpoint; 4 diverged;
75 saved and to be restarted (SIGTERM, SIGUSR1); 76 peers lost; 128+n killed by signal n (130: saved after SIGINT)"""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(
            " ".join(message.split()).replace(" :", ":"), "command line", f"see {self.prog} --help"
        )


def refuse_unknown(rest: list[str], command: str) -> None:
    if rest:
        raise UsageError(
            f"unknown option {rest[0]!r}", "command line", f"see lockstep {command} --help"
        )


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def integer(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return an argparse type: an integer within these bounds."""

    def parse(text: str) -> int:
        if (
            len(text) <= 20
            and text.removeprefix("-").isdecimal()
            and minimum <= (number := int(text)) <= maximum
        ):
            return number
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not an integer from {minimum} to {maximum:,}"
        )

    return parse


STEP, SEED, LIMIT = integer(0, 10**9), integer(0, 2**63 - 1), integer(0, 1 << 16)


def quantity(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Return an argparse type: a quantity above zero, which `parse` reads."""

    def positive(text: str) -> float:
        try:
            if (value := parse(text)) > 0:
                return value
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not above zero")

    return positive


def node_range(text: str) -> tuple[int, int]:
    """Return (MIN, MAX) of "2:4" or "2" (an argparse type)."""
    least, _, most = text.partition(":")
    count = integer(1, 1 << 16)
    bounds = count(least), count(most if ":" in text else least)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(
            f"the minimum of {text[:40]!r} exceeds its maximum; write MIN:MAX, such as 2:4"
        )
    return bounds


def step_or_best(text: str) -> int | str:
    """Return a step, or "best", which `main` replaces by a step."""
    return text if text == "best" else STEP(text)


STEP_OPTION: dict[str, Any] = {
    "type": step_or_best,
    "metavar": "STEP|best",
    "help": "checkpoint to use (default: the newest)",
}
WORKERS: dict[str, Any] = {"type": integer(1, 1 << 16), "metavar": "N"}
NODES: dict[str, Any] = {"type": node_range, "metavar": "MIN:MAX"}
TARGETS = (
    "slurm",
    "kubernetes",
    "jobset",
    "trainjob",
    "compose",
    "ray",
    "skypilot",
)  # files in render/templates
COMM_SIZES = "1 KiB, 4 KiB, 16 KiB, 64 KiB, 256 KiB, 1 MiB, 4 MiB, 16 MiB, 64 MiB"
BEAMS: dict[str, Any] = {
    "type": integer(1, 256),
    "default": 1,
    "help": "width of the beam search (default: 1, greedy)",
}
AVERAGE: dict[str, Any] = {"type": integer(0, 10_000), "default": 0, "metavar": "N"}
RUN_FOLDER: dict[str, Any] = {"type": Path, "metavar": "RUN", "help": "run folder"}
RESUME = {
    "default": "auto",
    "metavar": "auto|never|required|STEP",
    "help": "checkpoint to resume from (default: auto)",
}
OVERRIDE: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "KEY=VALUE",
    "help": "change the schedule from this checkpoint on (optim.learning_rate, warmup_steps, schedule, decay_steps, "
    "wsd_decay, floor), or an argument of your function; repeatable",
}
PROFILE: dict[str, Any] = {
    "default": "",
    "metavar": "steps=A..B",
    "help": "write a trace and a time breakdown of these steps",
}
PARENT: dict[str, Any] = {
    "type": integer(1, 1 << 22),
    "metavar": "PID",
    "help": "end the agent and its workers when the process PID, which started this command, exits",
}
RESTART: dict[str, Any] = {
    "choices": ["one", "all"],
    "help": "for scripts: replace a lost worker in place (one), or restart all workers as torchrun does (all); "
    "default: one if the script imports lockstep or opens a Session",
}
MODULE: dict[str, Any] = {
    "dest": "module",
    "metavar": "MODULE",
    "help": "run this module as a script, as python -m MODULE does",
}


def build_parser() -> Parser:
    parser = Parser(
        prog="lockstep",
        usage="lockstep [-h] [--version] COMMAND ...",
        description="Train PyTorch models on many machines, with identical bits through failures.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    # As wide as the longest command, which argparse would wrap otherwise; prog: it puts its usage
    # before the names.
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND     ", prog="lockstep", parser_class=Parser
    )
    add_training_commands(commands)
    add_host_commands(commands)
    add_run_commands(commands)
    add_checkpoint_commands(commands)
    add_network_commands(commands)
    add = add_command(
        commands,
        "recipes",
        "list the run files and scripts that come with Lockstep, print one, or copy a script",
    )
    help = "recipe to print (default: list all); copy SCRIPT FILE: your own copy of a script"
    add("name", nargs="*", metavar="NAME", help=help)
    add = add_command(
        commands, "completion", "print a script that completes the words of lockstep in a shell"
    )
    add("shell", choices=["bash", "zsh", "fish"])
    return parser


def add_command(
    commands: Commands, name: str, help: str, *, takes_target: bool = False
) -> Callable[..., Any]:
    """Add a command and return its `add_argument`.
    takes_target: its first argument is a run file or a function."""
    command = commands.add_parser(
        name, help=help, description=help, allow_abbrev=False, epilog=EXIT_CODES
    )
    if takes_target:
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        help = "run file, recipe, or Python function to train (default: a built-in run)"
        command.add_argument("target", nargs="?", metavar="RUN.toml|FILE.py:FUNCTION", help=help)
    return command.add_argument


def add_host_options(add: Callable[..., Any]) -> None:
    add(
        "--hosts",
        type=Path,
        metavar="HOSTS.toml",
        help="list of all hosts; start the same command on each of them",
    )
    add("--host", metavar="NAME", help="name of this host in the list (default: its hostname)")
    add("--ssh", action="store_true", help="start the command on all hosts by ssh")


def add_training_commands(commands: Commands) -> None:
    """Add the commands that plan, start and stop training."""
    add = add_command(
        commands,
        "train",
        "train a run file or a function on all devices of this machine",
        takes_target=True,
    )
    add(
        "--out",
        type=Path,
        help="run folder, or s3://BUCKET/RUN (default: runs/NAME of the run file, or runs/default)",
    )
    add(
        "--workers",
        **WORKERS,
        help="worker processes on this machine (default: one per GPU, two on a CPU)",
    )
    add("--resume", **RESUME)
    add("--override", **OVERRIDE)
    add("--profile", **PROFILE)
    add("--show", action="store_true", help="print every value with its origin, and exit")
    add(
        "--layout",
        choices=["auto"],
        help="auto: choose layout.* by lockstep plan for the devices of this machine",
    )

    add = add_command(
        commands,
        "plan",
        "rank the layouts of a run on given devices by memory and time",
        takes_target=True,
    )
    add(
        "--devices",
        required=True,
        metavar="HxD:KIND-MEMORY",
        help="hosts x devices of each, as 4x8:H100-80GB or 2x1:cpu-4GiB; another GPU: -MEMORY@TFLOPS[,GB/s]",
    )
    add(
        "--link",
        default="",
        metavar="RATE[,LATENCY]",
        help="of a host, shared by its workers, such as 100Gbit/s or 1Gbit/s,200us",
    )
    add(
        "--host-link",
        default="",
        metavar="RATE[,LATENCY]",
        help="between two devices of a host (default: an assumption)",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE.json",
        help="links as lockstep bench comm measured them, instead of --link",
    )
    add(
        "--measure",
        action="store_true",
        help="time the blocks of the model on this machine, instead of assuming FLOP/s",
    )
    add(
        "--out",
        type=Path,
        metavar="RUN",
        help="--measure: run folder whose data is used, prepared if missing (default: as for train)",
    )
    add(
        "--mtbf",
        default="",
        metavar="TIME",
        help="mean time between failures of a host in the run, such as 4h: adds the goodput",
    )
    add(
        "--price",
        type=float,
        metavar="P",
        help="dollars per device and hour: adds the price of a million tokens",
    )
    add("--json", action="store_true", help="print JSON")

    add = add_command(
        commands, "run", "run a script on all devices of this machine; its arguments follow FILE.py"
    )
    add("file", metavar="FILE.py", help="script that every worker runs as python FILE.py ARGUMENTS")
    add(
        "--out",
        type=Path,
        help="run folder (default: --out of the script's arguments, the folder of its Session, or runs/FILE)",
    )
    add(
        "--workers",
        **WORKERS,
        help="worker processes on this machine (default: one per GPU, two on a CPU)",
    )
    for axis, split in (
        ("shard", "the rows of each parameter"),
        ("tensor", "each layer"),
        ("pipeline", "the layers"),
    ):
        add(
            f"--layout.{axis}",
            **WORKERS,
            dest=axis,
            help=f"workers that share {split} (default: Session({axis}=...), or 1)",
        )
    add(
        "--track",
        action="append",
        metavar="NAME",
        help="tensorboard, wandb, wandb:offline or MODULE:CLASS; may be given several times "
        "(default: Session(track=[...]))",
    )
    add("--profile", **PROFILE)
    add("-m", **MODULE)
    add("--restart", **RESTART)
    add("--parent", **PARENT)
    add(
        "--follow-session",
        action="store_true",
        help="set by the agent: a Session may ask for another start, in its folder",
    )

    add = add_command(
        commands,
        "launch",
        "train on one or more hosts, and recover from lost workers and hosts",
        takes_target=True,
    )
    add(
        "--out",
        type=Path,
        help="run folder, on a disk that all hosts share, or s3://BUCKET/RUN (default: as for train)",
    )
    add(
        "--workers",
        **WORKERS,
        help="worker processes on this host, without --hosts (default: as for train); with --ray: on each node",
    )
    add_host_options(add)
    add(
        "--ray",
        action="store_true",
        help="start an agent on each node of a Ray cluster, and on the nodes that replace lost ones",
    )
    nodes_help = "instead of --hosts: a scheduler starts this command on MIN to MAX hosts, each with --workers workers"
    add(
        "--nodes",
        **NODES,
        help=f"{nodes_help}; --ray: on MAX nodes (default: every node with room)",
    )
    add(
        "--wait",
        type=integer(1, 86_400),
        default=60,
        metavar="SECONDS",
        help="--ray: how long to wait for the nodes (default: 60)",
    )
    add(
        "--address",
        help="IP address or name of this host for the others, without --hosts (default: --host, or 127.0.0.1 without --nodes)",
    )
    add("--parent", **PARENT)
    add(
        "--min",
        type=LIMIT,
        help="minimum number of workers to train with (default: 1; scripts with --restart all: all)",
    )
    add(
        "--max",
        type=LIMIT,
        help="maximum number of workers that train, others wait on standby (default: batch.micro_batches)",
    )
    add("--resume", **RESUME)
    add("--override", **OVERRIDE)
    add("-m", **MODULE)
    add("--restart", **RESTART)
    add(
        "--with-evaluator",
        action="store_true",
        help="score every checkpoint in a separate process; with --ssh on the first host, in a store on each",
    )
    add(
        "--stop",
        type=Path,
        metavar="RUN",
        help="ask the run in this folder to save and stop, from any host, and exit",
    )


def add_host_commands(commands: Commands) -> None:
    """Add the commands about the hosts of a run, before it starts."""
    add = add_command(
        commands,
        "render",
        "write the file that starts a run file on a cluster, on a range of nodes",
    )
    add("target", choices=TARGETS)
    add("run_file", metavar="RUN.toml", help="run file or recipe")
    add("--nodes", **NODES, required=True, help="the run trains with MIN nodes or more; up to MAX")
    add(
        "--gpus",
        type=integer(0, 1024),
        default=0,
        metavar="N",
        help="GPUs of each node, with a worker for each (default: 0, CPUs)",
    )
    add("--workers", **WORKERS, help="workers of each node (default: one per GPU, two on CPUs)")
    add(
        "--run",
        metavar="RUN",
        help="run folder on the shared disk, or s3://BUCKET/RUN (default: runs/NAME of the run file)",
    )
    add("--image", help="container image with Lockstep (default: lockstep:VERSION)")
    add("--out", type=Path, metavar="FILE", help="file to write (default: print it)")

    add = add_command(
        commands, "bench", "measure the network between the hosts of a run: lockstep bench comm"
    )
    add(
        "what",
        nargs="?",
        choices=["comm"],
        help="comm: time, bandwidth and latency of collectives and messages, slow links",
    )
    help = "file for the results, on a disk that all hosts share, or s3://BUCKET/RUN; the run folder is FILE (default: runs/comm.json)"
    add("--out", type=Path, default=Path("runs/comm.json"), metavar="FILE.json", help=help)
    add(
        "--sizes",
        default=COMM_SIZES,
        help=f"bytes of the buffers, separated by commas (default: {COMM_SIZES})",
    )
    add(
        "--workers",
        **WORKERS,
        help="worker processes on this machine, without --hosts (default: as for train)",
    )
    add_host_options(add)

    add = add_command(
        commands,
        "doctor",
        "examine the hosts before a run: versions, network, run folder, limits; exit code 0: a run can start",
    )
    help = "run folder or s3://BUCKET/RUN to examine (default: runs/default)"
    add("--out", type=Path, default=Path("runs/default"), metavar="RUN", help=help)
    add(
        "--wait",
        type=integer(1, 3600),
        default=60,
        metavar="SECONDS",
        help="how long to wait for other hosts (default: 60)",
    )
    add(
        "--workers",
        **WORKERS,
        help="worker processes on this machine, without --hosts (default: as for train)",
    )
    add_host_options(add)


def add_run_commands(commands: Commands) -> None:
    """Add the commands that show and test a run."""
    add = add_command(
        commands, "status", "list the members of a run: hosts, process ids, roles and steps"
    )
    add("folder", **RUN_FOLDER)
    add("--json", action="store_true", help="print JSON")

    add = add_command(
        commands,
        "watch",
        "show a run in the terminal until it ends: workers, speed, generations, failures, checkpoints",
    )
    add(
        "run",
        metavar="RUN|HOST:RUN",
        help="run folder, s3://BUCKET/RUN, or a folder on a host that ssh reaches",
    )
    add(
        "--every",
        type=quantity(parse_seconds),
        default=2.0,
        metavar="TIME",
        help="time between two refreshes (default: 2 s)",
    )

    add = add_command(
        commands,
        "report",
        "write one HTML file about a run, or two runs together: loss, time, failures, hosts, values",
    )
    add("folder", **RUN_FOLDER)
    add("--compare", type=Path, metavar="RUN2", help="draw this run in the same charts")
    add(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="file to write (default: RUN/report.html; with --compare RUN/compare.html)",
    )

    add = add_command(
        commands,
        "drill",
        "train with faults or other numbers of workers, and compare the hashes",
        takes_target=True,
    )
    add(
        "--workers",
        **WORKERS,
        help="worker processes on this machine (default: 3, or as the layout requires; self-check: 2)",
    )
    help = "number of faults (default: 7, one of each kind); a function without --faults: self-check with 1 and N workers"
    add("--faults", type=integer(1, 10_000), help=help)
    add("--seed", type=SEED, default=1, help="seed of the faults (default: 1)")
    add("--out", type=Path, help="new folder, or s3://BUCKET/PREFIX (default: runs/drill)")


def add_checkpoint_commands(commands: Commands) -> None:
    """Add the commands that use the checkpoints of a run."""
    add = add_command(commands, "evaluate", "score the checkpoints of a run on its held-out data")
    add("folder", **RUN_FOLDER)
    add("--step", **STEP_OPTION)
    add("--follow", action="store_true", help="wait for new checkpoints until the run is finished")
    add(
        "--split",
        choices=["validation", "test"],
        default="validation",
        help="held-out data to use (default: validation)",
    )
    add("--beams", **BEAMS)
    add("--average", help="score the mean of the newest N checkpoints' weights", **AVERAGE)
    add(
        "--workers",
        **WORKERS,
        help="worker processes that share the work (default: 1); the score is the same for any number",
    )
    add(
        "--lm-eval",
        metavar="TASKS",
        help="score with these tasks of lm-eval instead, separated by commas",
    )
    add(
        "--include-path",
        type=Path,
        metavar="FOLDER",
        help="lm-eval: folder with further tasks, as YAML files",
    )
    add("--chat", action="store_true", help="lm-eval: apply the model's chat template")

    add = add_command(commands, "translate", "translate a text, or lines from standard input")
    add("folder", **RUN_FOLDER)
    add("text", nargs="*", help="text to translate (default: lines from standard input)")
    add("--step", **STEP_OPTION)
    add("--beams", **BEAMS)
    add("--average", help="use the mean of the newest N checkpoints' weights", **AVERAGE)

    add = add_command(
        commands, "generate", "continue a text, or lines from standard input, with a Llama"
    )
    add(
        "folder",
        type=Path,
        metavar="RUN|HF-FOLDER",
        help="folder of a run or of a Hugging Face model",
    )
    add("text", nargs="*", help="text to continue (default: lines from standard input)")
    add(
        "--tokens",
        type=integer(1, 1 << 20),
        default=128,
        help="maximum number of new tokens (default: 128)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="0: the most probable token; higher: more varied (default: 0)",
    )
    add(
        "--top-k",
        type=integer(0, 1 << 20),
        default=0,
        help="sample from the K most probable tokens; 0: from all (default: 0)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most probable tokens of this total probability (default: 1)",
    )
    add("--seed", type=SEED, default=0, help="seed of the samples (default: 0)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; repeatable",
    )
    add(
        "--chat",
        action="store_true",
        help="answer the text as a user's message, with the model's chat template",
    )
    add("--step", **STEP_OPTION)
    add(
        "--compile",
        action="store_true",
        help="compile the decoding step; faster for long continuations",
    )
    add(
        "--tensor",
        type=WORKERS["type"],
        default=1,
        metavar="T",
        help="split the model over T processes of this machine (default: 1)",
    )
    add("--file", type=Path, help="read lines from this file instead of standard input")

    add = add_command(
        commands, "checkpoint", "list, verify, digest, import or export the checkpoints of a run"
    )
    add("action", choices=["list", "verify", "digest", "import", "export"])
    add("folder", type=Path, metavar="RUN", help="run folder; import: a Hugging Face folder")
    add("step", nargs="?", **STEP_OPTION)
    add(
        "--out",
        type=Path,
        help="export: .safetensors file (of a Llama: folder) to write; import: run folder to write",
    )
    add(
        "--shard-bytes",
        metavar="SIZE",
        help="export of a Llama: maximum size of a file (default: 5 GB)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="export of a Llama: data type (default: as in the initial model)",
    )
    add(
        "--adapter",
        action="store_true",
        help="export of a Llama with LoRA: the adapters alone, for PEFT (default: merged weights)",
    )


def add_network_commands(commands: Commands) -> None:
    """Add the commands about the network."""
    rate: dict[str, Any] = {"type": quantity(parse_rate), "metavar": "RATE"}
    add = add_command(
        commands,
        "lab",
        "simulate a collective on a network that you describe, draw it, or run its messages",
    )
    add("collective", choices=COLLECTIVES)
    add("--ranks", type=integer(2, 1 << 16), required=True, metavar="N", help="number of ranks")
    add(
        "--bytes",
        type=quantity(parse_bytes),
        required=True,
        metavar="SIZE",
        help="size of the buffer, such as '5 MB'",
    )
    add(
        "--rate",
        **rate,
        required=True,
        help="rate of a host's port, such as '100 Mbit/s' or '1 MB/s'",
    )
    add(
        "--latency",
        type=quantity(parse_seconds),
        default=0.0,
        metavar="TIME",
        help="latency of a message, such as '50 us' (default: 0)",
    )
    add("--algorithm", choices=ALGORITHMS, help="algorithm to show (default: compare all)")
    add(
        "--ranks-per-host",
        type=integer(1, 128),
        default=1,
        metavar="R",
        help="ranks on a host, which share its port (default: 1)",
    )
    add("--host-rate", **rate, help="rate between two ranks of a host (default: 10 times --rate)")
    add(
        "--host-latency",
        type=quantity(parse_seconds),
        metavar="TIME",
        help="latency inside a host (default: a tenth of --latency)",
    )
    add(
        "--run",
        action="store_true",
        help="also send the messages, between N processes of this machine, and compare with torch",
    )
    add("--picture", type=Path, metavar="FILE.svg", help="draw rounds and ranks; needs --algorithm")
    add("--json", action="store_true", help="print one line of JSON")
