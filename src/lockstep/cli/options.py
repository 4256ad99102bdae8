"""The commands and their options as a table: the parser, the help, the pages of docs/reference and
the completion of shells follow from it. Imports neither torch nor a command.

A command lists its options one a line: the spelling, two spaces, and the help. Indented lines
continue it. An option is spelled as in the help, with what argparse has to know:

--json                  a switch
--out FILE              a value; its word decides the type (TYPES)
--split {a,b}           one of these words
--stop TEXT...          may be given several times
--wait SECONDS = 60     a default, which the help names
folder RUN              an argument; [folder RUN] may be missing, [text TEXT...] are any number
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import UsageError, perhaps
from lockstep.network.collectives import ALGORITHMS, COLLECTIVES
from lockstep.units import parse_bytes, parse_count, parse_rate, parse_seconds

INTRODUCTION = """\
Train PyTorch models on many machines, with identical bits through failures.

  lockstep run train.py --workers 4              your script
  lockstep launch train.py --hosts hosts.toml    your script, on several hosts
  lockstep train recipes/translate.toml          a recipe; lockstep recipes lists them"""
EXIT_CODES = """\
exit codes: 0 success; 1 training failed; 2 usage or configuration; 3 damaged data or checkpoint; \
4 diverged;
75 saved and to be restarted (SIGTERM, SIGUSR1); 76 peers lost; \
128+n killed by signal n (130: saved after SIGINT)"""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError. commands: by name, the parsers of the commands"""

    commands: Mapping[str, "Parser"]

    def error(self, message: str) -> None:  # type: ignore[override]
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        near = perhaps(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        if choice and choice[1].endswith(".py"):
            near = f"lockstep run {choice[1]}"
        what = " ".join(message.split()).replace(" :", ":")
        raise UsageError(what, "command line", near or f"see {self.prog} --help")

    def refuse_unknown(self, words: Iterable[str]) -> None:
        """UsageError for an option that the command does not have."""
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if re.fullmatch("--?[a-zA-Z][^ ]*", name) and name not in self._option_string_actions:
                raise self.unknown(name)

    def unknown(self, word: str) -> UsageError:
        what, known = "unknown option", [*self._option_string_actions]
        if not word.startswith("-"):
            what, known = "unexpected word", [*known, *COMMANDS]
        hint = perhaps(word, known) or f"see {self.prog} --help"
        return UsageError(f"{what} {word!r}", "command line", hint)


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


COUNT = integer(1, 1 << 16)


def quantity(parse: Callable[[str], float], *, or_zero: bool = False) -> Callable[[str], float]:
    """Return an argparse type: a quantity above zero, which `parse` reads."""

    def positive(text: str) -> float:
        try:
            if (value := parse(text)) > 0 or or_zero:
                return value
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not above zero")

    return positive


def node_range(text: str) -> tuple[int, int]:
    """Return (MIN, MAX) of "2:4" or "2" (an argparse type)."""
    least, _, most = text.partition(":")
    bounds = COUNT(least), COUNT(most if ":" in text else least)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(
            f"the minimum of {text[:40]!r} exceeds its maximum; write MIN:MAX, such as 2:4"
        )
    return bounds


def step_or_best(text: str) -> int | str:
    """Return a step, or "best", which `main` replaces by a step."""
    return text if text == "best" else integer(0, 10**9)(text)


def one_of(words: Sequence[str]) -> str:
    return f"{{{','.join(words)}}}"


PATHS = ("OUT", "RUN", "RUN2", "FOLDER", "RUN|HF-FOLDER", "HOSTS.toml")
FILES = ("FILE", "FILE.json", "FILE.html", "FILE.svg")
# Types of values by their words in the help; others are texts.
TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys((*PATHS, *FILES), Path),
    **dict.fromkeys(("N", "T", "FAULTS"), COUNT),
    **dict.fromkeys(("MIN", "MAX", "GPUS", "COUNT", "K"), integer(0, 1 << 16)),
    **dict.fromkeys(("P", "TOP_P", "TEMPERATURE"), float),
    "MIN:MAX": node_range,
    "STEP": integer(1, 10**9),
    "STEP|best": step_or_best,
    "RANKS": integer(2, 1 << 16),
    "R": integer(1, 128),
    "BEAMS": integer(1, 256),
    "TOKENS": integer(1, 1 << 20),
    "TOP_K": integer(0, 1 << 20),
    "SEED": integer(0, 2**63 - 1),
    "PID": integer(1, 1 << 22),
    "SECONDS": integer(1, 86_400),
    "TIME": quantity(parse_seconds),
    "TOTAL": quantity(parse_count),
    "LATENCY": quantity(parse_seconds, or_zero=True),
    "RATE": quantity(parse_rate),
    "SIZE": quantity(parse_bytes),
}


@dataclass(frozen=True)
class Command:
    """A command: a sentence about it, its options, and what else it accepts.

    required       names of the options that must be given
    rest           further words: "keys" of a run as --section.key VALUE, or the "words" of a script
    takes_address  its run folder may be an address in a store, which the command handles by itself
    usage          line of its help; "": argparse writes it
    needs_text     the packages of the extra [text], unless its target is a script
    """

    help: str
    options: str  # one a line, as above
    required: tuple[str, ...] = ()
    rest: Literal["", "keys", "words"] = ""
    takes_address: bool = False
    usage: str = ""
    needs_text: bool = False


# Files in render/templates.
TARGETS = ("slurm", "kubernetes", "jobset", "trainjob", "compose", "ray", "skypilot")
COMM_SIZES = "1 KiB, 4 KiB, 16 KiB, 64 KiB, 256 KiB, 1 MiB, 4 MiB, 16 MiB, 64 MiB"

TARGET = """\
[target RUN.toml|FILE.py:FUNCTION]  run file, recipe, or Python function to train (default: a
    built-in run)"""
LOCAL_WORKERS = """\
--workers N  worker processes on this machine (default: one per GPU, two on a CPU)"""
PROFILE = "--profile steps=A..B  write a trace and a time breakdown of these steps"
PARENT = """\
--parent PID  end the agent and its workers when the process PID, which started this command,
    exits"""
RESUME = """\
--resume auto|never|required|STEP = auto  checkpoint to resume from
--override KEY=VALUE...  change the schedule from this checkpoint on (optim.learning_rate,
    warmup_steps, schedule, decay_steps, wsd_decay, floor), or an argument of your function;
    repeatable"""
SCRIPT = """\
-m MODULE  run this module as a script, as python -m MODULE does
--restart {one,all}  for scripts: replace a lost worker in place (one), or restart all workers as
    torchrun does (all); default: one if the script imports lockstep or opens a Session"""
HOSTS = """\
--hosts HOSTS.toml  list of all hosts; start the same command on each of them
--host NAME  name of this host in the list (default: its hostname)
--ssh  start the command on all hosts by ssh"""
HOST_WORKERS = """\
--workers N  worker processes on this machine, without --hosts (default: as for train)"""
RUN = "folder RUN  run folder"
STEP = "--step STEP|best  checkpoint to use (default: the newest)"
BEAMS = "--beams BEAMS = 1  width of the beam search; 1: greedy"

COMMANDS = {
    "run": Command(
        "run your script on all devices of this machine, and replace lost workers",
        f"""
file FILE.py  script that every worker runs as python FILE.py ARGUMENTS; in lockstep run train.py
    --workers 4 --lr 0.1 the script gets --lr 0.1
--out OUT  run folder (default: --out of the script's arguments, the folder of its Session, or
    runs/FILE)
{LOCAL_WORKERS}
--layout.shard N  workers that share the rows of each parameter (default: Session(shard=...), or
    1)
--layout.tensor N  workers that share each layer (default: Session(tensor=...), or 1)
--layout.pipeline N  workers that share the layers (default: Session(pipeline=...), or 1)
--track NAME...  tensorboard, wandb, wandb:offline or MODULE:CLASS; may be given several times
    (default: Session(track=[...]))
{PROFILE}
{SCRIPT}
{PARENT}
--follow-session  set by the agent: a Session may ask for another start, in its folder
""",
        rest="words",
        usage="lockstep run FILE.py [OPTIONS] [ARGUMENTS OF THE SCRIPT]",
    ),
    "launch": Command(
        "run your script or a recipe on one or more hosts, and replace lost workers and hosts",
        f"""
{TARGET}
--out OUT  run folder, on a disk that all hosts share, or s3://BUCKET/RUN (default: as for train)
--workers N  worker processes on this host, without --hosts (default: as for train); with --ray:
    on each node
{HOSTS}
--ray  start an agent on each node of a Ray cluster, and on the nodes that replace lost ones
--nodes MIN:MAX  instead of --hosts: a scheduler starts this command on MIN to MAX hosts, each
    with --workers workers; --ray: on MAX nodes (default: every node with room)
--wait SECONDS = 60  --ray: how long to wait for the nodes
--address ADDRESS  IP address or name of this host for the others, without --hosts (default:
    --host, or 127.0.0.1 without --nodes)
{PARENT}
--min MIN  minimum number of workers to train with (default: 1; scripts with --restart all: all)
--max MAX  maximum number of workers that train, others wait on standby (default:
    batch.micro_batches)
{RESUME}
{SCRIPT}
--with-evaluator  score every checkpoint in a separate process; with --ssh on the first host, in a
    store on each
--stop RUN  ask the run in this folder to save and stop, from any host, and exit
""",
        rest="keys",
        needs_text=True,
    ),
    "status": Command(
        "list the members of a run: hosts, process ids, roles and steps",
        f"""
{RUN}
--json  print JSON
""",
    ),
    "watch": Command(
        "show a run in the terminal until it ends: workers, speed, generations, failures, "
        "checkpoints",
        """
run RUN|HOST:RUN  run folder, s3://BUCKET/RUN, or a folder on a host that ssh reaches
--every TIME = 2 s  time between two refreshes
""",
        takes_address=True,
    ),
    "report": Command(
        "write one HTML file about a run, or two runs together: loss, time, failures, hosts, "
        "values",
        f"""
{RUN}
--compare RUN2  draw this run in the same charts
--out FILE.html  file to write (default: RUN/report.html; with --compare RUN/compare.html)
""",
    ),
    "checkpoint": Command(
        "list, verify, digest, import or export the checkpoints of a run",
        """
action {list,verify,digest,import,export}
folder RUN  run folder; import: a Hugging Face folder
[step STEP|best]  checkpoint to use (default: the newest)
--out OUT  export: .safetensors file (of a Llama: folder) to write; import: run folder to write
--shard-bytes SIZE = 5 GB  export of a Llama: maximum size of a file
--dtype {float32,bfloat16,float16}  export of a Llama: data type (default: as in the initial
    model)
--adapter  export of a Llama with LoRA: the adapters alone, for PEFT (default: merged weights)
""",
    ),
    "replay": Command(
        "compute a step of a run once more, and compare it with the record",
        f"""
{RUN}
--step STEP  the step, by its number in metrics.jsonl
--micro-batch K  look into this micro-batch; with --debug or --dump (default: 0)
--debug  stop in pdb inside the loop, when it gets the micro-batch
--dump FOLDER  write inputs, outputs and gradients of every module in the micro-batch to this folder
--from-start  compute all steps where no checkpoint before the step is left
""",
        required=("--step",),
    ),
    "diff": Command(
        "find the step, the module and the tensor at which two runs part",
        f"""
{RUN}
other RUN2  run to compare it with
--python-a FILE  interpreter that replays RUN, with the code that it ran (default: this one)
--python-b FILE  interpreter that replays RUN2
--from-start  compute all steps where no checkpoint before the step is left
""",
    ),
    "why": Command(
        "name the micro-batch and the samples that have made the loss of a step",
        f"""
{RUN}
--step STEP  the step, by its number in metrics.jsonl
--from-start  compute all steps where no checkpoint before the step is left
""",
        required=("--step",),
    ),
    "drill": Command(
        "train with faults or other numbers of workers, and compare the hashes",
        f"""
{TARGET}
--workers N  worker processes on this machine (default: 3, or as the layout requires; self-check:
    2)
--faults FAULTS  number of faults (default: 7, one of each kind); a function without --faults:
    self-check with 1 and N workers
--seed SEED = 1  seed of the faults
--out OUT  new folder, or s3://BUCKET/PREFIX (default: runs/drill)
""",
        rest="keys",
        takes_address=True,
        needs_text=True,
    ),
    "doctor": Command(
        "examine the hosts before a run: versions, network, run folder, limits; exit code 0: a "
        "run can start",
        f"""
--out RUN = runs/default  run folder or s3://BUCKET/RUN to examine
--wait SECONDS = 60  how long to wait for other hosts
{HOST_WORKERS}
{HOSTS}
""",
        takes_address=True,
    ),
    "train": Command(
        "train a recipe, a run file or a function on all devices of this machine",
        f"""
{TARGET}
--out OUT  run folder, or s3://BUCKET/RUN (default: runs/NAME of the run file, or runs/default)
{LOCAL_WORKERS}
{RESUME}
{PROFILE}
--show  print every value with its origin, and exit
--layout {{auto}}  auto: choose layout.* by lockstep plan for the devices of this machine
""",
        rest="keys",
        needs_text=True,
    ),
    "recipes": Command(
        "list the run files and scripts that come with Lockstep, print one, or copy a script",
        """
[name NAME...]  recipe to print (default: list all); copy SCRIPT FILE: your own copy of a script
""",
    ),
    "evaluate": Command(
        "score the checkpoints of a run on its held-out data",
        f"""
{RUN}
{STEP}
--follow  wait for new checkpoints until the run is finished
--split {{validation,test}} = validation  held-out data to use
{BEAMS}
--average COUNT = 0  score the mean of the newest COUNT checkpoints' weights; 0: one
--workers N  worker processes that share the work (default: 1); the score is the same for any
    number
--lm-eval TASKS  score with these tasks of lm-eval instead, separated by commas
--include-path FOLDER  lm-eval: folder with further tasks, as YAML files
--chat  lm-eval: apply the model's chat template
""",
        needs_text=True,
    ),
    "translate": Command(
        "translate a text, or lines from standard input",
        f"""
{RUN}
[text TEXT...]  text to translate (default: lines from standard input)
{STEP}
{BEAMS}
--average COUNT = 0  use the mean of the newest COUNT checkpoints' weights; 0: one
""",
        needs_text=True,
    ),
    "generate": Command(
        "continue a text, or lines from standard input, with a Llama",
        f"""
folder RUN|HF-FOLDER  folder of a run or of a Hugging Face model
[text TEXT...]  text to continue (default: lines from standard input)
--tokens TOKENS = 128  maximum number of new tokens
--temperature TEMPERATURE = 0  0: the most probable token; higher: more varied
--top-k TOP_K = 0  sample from the K most probable tokens; 0: from all
--top-p TOP_P = 1  sample from the most probable tokens of this total probability
--seed SEED = 0  seed of the samples
--stop TEXT...  stop before this text; repeatable
--chat  answer the text as a user's message, with the model's chat template
{STEP}
--compile  compile the decoding step; faster for long continuations
--tensor T = 1  split the model over T processes of this machine
--file FILE  read lines from this file instead of standard input
""",
        rest="words",
        needs_text=True,
    ),
    "plan": Command(
        "rank the layouts of a run on given devices by memory and time",
        f"""
{TARGET}
--devices HxD:KIND-MEMORY  hosts x devices of each, as 4x8:H100-80GB or 2x1:cpu-4GiB; another GPU:
    -MEMORY@TFLOPS[,GB/s]
--link RATE[,LATENCY] =  of a host, shared by its workers, such as 100Gbit/s or 1Gbit/s,200us
--host-link RATE[,LATENCY] =  between two devices of a host (default: an assumption)
--profile FILE.json  links as lockstep bench comm measured them, instead of --link
--measure  time the blocks of the model on this machine, instead of assuming FLOP/s
--out RUN  --measure: run folder whose data is used, prepared if missing (default: as for train)
--mtbf TIME  mean time between failures of a host in the run, such as 4h: adds the goodput
--price P  dollars per device and hour: adds the price of a million tokens
--tokens TOTAL  tokens to train on, such as 20e9 or 20B: adds device hours, wall time, and with
    --price dollars
--json  print JSON
""",
        required=("--devices",),
        rest="keys",
        needs_text=True,
    ),
    "render": Command(
        "write the file that starts a run file on a cluster, on a range of nodes",
        f"""
target {one_of(TARGETS)}
run_file RUN.toml  run file or recipe
--nodes MIN:MAX  the run trains with MIN nodes or more; up to MAX
--gpus GPUS = 0  GPUs of each node, with a worker for each; 0: CPUs
--workers N  workers of each node (default: one per GPU, two on CPUs)
--run FOLDER|s3://BUCKET/RUN  run folder on the shared disk, or in a store (default: runs/NAME of
    the run file)
--image IMAGE  container image with Lockstep (default: lockstep:VERSION)
--out FILE  file to write (default: print it)
""",
        required=("--nodes",),
        rest="keys",
    ),
    "bench": Command(
        "measure the network between the hosts of a run: lockstep bench comm",
        f"""
[what {{comm}}]  comm: time, bandwidth and latency of collectives and messages, slow links
--out FILE.json = runs/comm.json  file for the results, on a disk that all hosts share, or
    s3://BUCKET/RUN; the run folder is FILE
--sizes SIZES = {COMM_SIZES}  bytes of the buffers, separated by commas
{HOST_WORKERS}
{HOSTS}
""",
        takes_address=True,
    ),
    "lab": Command(
        "simulate a collective on a network that you describe, draw it, or run its messages",
        f"""
collective {one_of(COLLECTIVES)}
--ranks RANKS  number of ranks
--bytes SIZE  size of the buffer, such as '5 MB'
--rate RATE  rate of a host's port, such as '100 Mbit/s' or '1 MB/s'
--latency LATENCY = 0 us  latency of a message, such as '50 us'
--algorithm {one_of(ALGORITHMS)}  algorithm to show (default: compare all)
--ranks-per-host R = 1  ranks on a host, which share its port
--host-rate RATE  rate between two ranks of a host (default: 10 times --rate)
--host-latency TIME  latency inside a host (default: a tenth of --latency)
--run  also send the messages, between RANKS processes of this machine, and compare with torch
--picture FILE.svg  draw rounds and ranks; needs --algorithm
--json  print one line of JSON
""",
        required=("--ranks", "--bytes", "--rate"),
    ),
    "completion": Command(
        "print a script that completes the words of lockstep in a shell",
        """
shell {bash,zsh,fish}
""",
    ),
}
RUN_COMMANDS = tuple(name for name, command in COMMANDS.items() if command.rest == "keys")


def build_parser() -> Parser:
    parser = Parser(
        prog="lockstep",
        usage="lockstep [-h] [--version] COMMAND ...",
        description=INTRODUCTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    # As wide as the longest command, which argparse would wrap otherwise; prog: it puts its usage
    # before the names.
    parsers = parser.add_subparsers(
        dest="command", metavar="COMMAND     ", prog="lockstep", parser_class=Parser
    )
    parser.commands = parsers.choices
    for command_name, command in COMMANDS.items():
        added = parsers.add_parser(
            command_name,
            help=command.help,
            usage=command.usage or None,
            description=command.help,
            allow_abbrev=False,
            epilog=EXIT_CODES,
        )
        for line in command.options.strip().replace("\n    ", " ").split("\n"):
            name, keywords = keywords_of(*line.partition("  ")[::2])
            if name in command.required:
                keywords["required"] = True
            added.add_argument(name, **keywords)
    return parser


def keywords_of(spelled: str, help: str) -> tuple[str, dict[str, Any]]:
    """Return the name of an option, and what argparse takes for it."""
    words, has_default, default = spelled.partition(" =")
    may_be_missing = words.startswith("[")
    if may_be_missing:
        words = words[1:-1]
    name, _, value = words.partition(" ")
    is_option = name.startswith("-")
    keywords: dict[str, Any] = {"help": help}
    if is_option and not value:
        return name, keywords | {"action": "store_true"}
    word = value.removesuffix("...")
    if word.startswith("{"):
        keywords["choices"] = word[1:-1].split(",")
    else:
        keywords |= {"metavar": word, "type": TYPES.get(word, str)}
    if value != word:
        keywords |= {"action": "append", "default": []} if is_option else {"nargs": "*"}
    elif may_be_missing:
        keywords["nargs"] = "?"
    if has_default:
        keywords["default"] = default.lstrip()
    if default:
        keywords["help"] = f"{help} (default:{default})"
    if name == "-m":
        keywords["dest"] = "module"
    return name, keywords


def option_words(args: argparse.Namespace, *names: str) -> list[str]:
    """Return the words of these options; none for an option that was not given."""
    words: list[str] = []
    for name in names:
        value = vars(args)[name]
        if value is not None and value is not False:
            words += [f"--{name}", *([] if value is True else [str(value)])]
    return words
