"""A run as a job of a cluster, and the file that starts it: templates/TARGET, filled in.

Paths, names and images are restricted to characters that mean nothing to a shell, to YAML and to
Compose, so no template quotes them.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import lockstep
from lockstep.config.resolve import read_toml, resolve
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError, UsageError
from lockstep.files import scheme_of
from lockstep.record.backends import without_secrets

PATH = re.compile(r"[\w./][\w.:@+=/-]*")
VALUE = re.compile(r"[\w.:@+=/,%-]+")
IMAGE = re.compile(
    r"([a-z0-9][\w.-]*(:\d+)?/)?[a-z0-9][\w./-]*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII
)
# Tokens of Hugging Face, OpenAI, Weights & Biases, GitHub, GitLab, Slack, AWS and Google.
TOKEN = re.compile(
    r"\b(hf_|sk-|wandb_v1_|gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA|AIza)[A-Za-z0-9_-]{12,}"
    r"|\b[0-9a-f]{40}\b"
)
# Words that YAML reads as numbers and truth values.
NOT_TEXT = re.compile(r"\d.*|y|n|yes|no|on|off|true|false|null")
# Not set: AWS, and the machine's role.
STORE_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
# To YAML, or unprintable there; TOML permits them in a line.
LINE_BREAKS = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")


@dataclass(frozen=True)
class Job:
    """A run on `fewest` to `most` nodes with `workers` workers each.

    run_file  as given, for nodes that see it
    toml      its values without its comments, for nodes that do not
    run       run folder, on a disk that all nodes share, or in an object store
    stored    in an object store: the nodes share no disk
    gpus      of each node; 0: the workers train on CPUs
    secrets   names of the environment variables with secrets that the run reads
    flags     keys of the run on the command line, as " --section.key=VALUE"
    """

    name: str
    run_file: str
    toml: str
    fewest: int
    most: int
    gpus: int
    workers: int
    run: str
    stored: bool
    image: str
    secrets: tuple[str, ...]
    flags: str = ""


def make_job(
    file: Path,
    nodes: tuple[int, int],
    *,
    gpus: int,
    workers: int,
    run_folder: str,
    image: str,
    flags: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Job, RunConfig]:
    """Return the job and its run. ConfigError for an invalid run file or a secret in it, UsageError
    for names that cannot be written into every file.
    flags: keys of the run on the command line"""
    run, values = resolve(file, flags).run, read_toml(file)
    refuse_secrets(values, str(file))
    refuse_secrets(flags, "command line")
    name = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")[:40].strip("-")
    name = f"run-{name}" if NOT_TEXT.fullmatch(name) else name
    checks = {"RUN.toml": (str(file), PATH), "--run": (run_folder, PATH), "--image": (image, IMAGE)}
    for option, (text, pattern) in checks.items():
        if not pattern.fullmatch(text):
            raise UsageError(
                f"{text[:200]!r} cannot be written into a job file",
                option,
                "use letters, digits and . _ - / only"
                if pattern is PATH
                else "write [HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST]",
            )
    for key, text in flags.items():
        if not VALUE.fullmatch(text):
            raise UsageError(
                f"{text[:200]!r} cannot be written into the command of a job file",
                f"--{key}",
                f"set it in the run file {file}, or use letters, digits and . _ - / : , = only",
            )
    words = "".join(f" --{key}={text}" for key, text in flags.items())
    if not name:
        raise UsageError(
            f"{file.name!r} gives the job no name",
            "RUN.toml",
            "jobs are named with a-z, 0-9 and -: rename the run file",
        )
    return Job(
        name,
        str(file),
        to_toml(values),
        *nodes,
        gpus,
        workers,
        run_folder,
        bool(scheme_of(run_folder)),
        image,
        secrets_of(run),
        words,
    ), run


def refuse_secrets(values: Mapping[str, Any], where: str) -> None:
    """ConfigError if a value of a run looks like a secret: others can read job files."""
    public = without_secrets(values)
    secret = [
        key for key, value in values.items() if public[key] != value or TOKEN.search(str(value))
    ]
    if secret:
        variable = f"LOCKSTEP_{secret[0].upper().replace('.', '_')}"
        raise ConfigError(
            f"the value of {', '.join(secret)} looks like a secret; it is not shown or rendered",
            where,
            f"remove it there, and set {variable} where the job runs, from a secret store",
        )


def secrets_of(run: RunConfig) -> tuple[str, ...]:
    """Return the names of the environment variables with secrets that this run reads."""
    from_hub = run.data.kind == "huggingface" or bool(run.llama.init_from)
    return ("WANDB_API_KEY",) * (run.track.wandb == "online") + ("HF_TOKEN",) * from_hub


def to_toml(values: Mapping[str, Any]) -> str:
    """Return dotted keys as TOML whose lines are lines of YAML too."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return LINE_BREAKS.sub(lambda match: f"\\u{ord(match[0]):04X}", tomli_w.dumps(tree)).strip()


def render(target: str, job: Job) -> str:
    """Return the file that starts the job on `target`."""
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sizes = f"--nodes {job.fewest}:{job.most} --workers {job.workers}{job.flags}"
    wheel = f"lockstep_train-{lockstep.__version__}-py3-none-any.whl"
    values = {
        **asdict(job),
        "title": title(target, job),
        "sizes": sizes,
        "wheel": wheel,
        "workdir": "/work" if job.stored else "/shared",
    }
    text = environment.get_template(target).render(
        values, store_variables=STORE_VARIABLES * job.stored
    )
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().split("\n"))


def title(target: str, job: Job) -> str:
    """Return two comment lines: the job, and the command that rendered it."""
    nodes = (
        f"{job.fewest} to {job.most} nodes"
        if job.fewest < job.most
        else f"{job.most} node{'s' * (job.most > 1)}"
    )
    devices = (
        f"{job.gpus} GPU{'s' * (job.gpus > 1)}"
        if job.gpus
        else f"{job.workers} CPU worker{'s' * (job.workers > 1)}"
    )
    options = f"--nodes {job.fewest}:{job.most}" + f" --gpus {job.gpus}" * bool(job.gpus)
    options += f" --workers {job.workers}" * (job.workers != (job.gpus or 2))
    options += f" --run {job.run}" * (job.run != f"runs/{Path(job.run_file).stem}")
    options += job.flags
    return (
        f"# {job.name}: {nodes} with {devices} each\n"
        f"# lockstep render {target} {job.run_file} {options}"
    )
