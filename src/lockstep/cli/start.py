"""The run that the words of `train`, `run` or `launch` describe, and how its workers start here.

The workers of this machine start under an agent: how many, and with which layout.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.agent.agent import AgentConfig, run_fixed_group, run_until_end
from lockstep.agent.forkserver import FIXED_PRELOAD, PRELOAD, RECIPE_PRELOAD, WorkerProgram
from lockstep.agent.restart_policy import PLAIN_SCRIPT_POLICY
from lockstep.cli.report import last_leader_host, write_at_end
from lockstep.cli.script import (
    folder_of,
    imports_lockstep,
    imports_recipes,
    is_script,
    opens_session,
    read_script,
    read_sources,
)
from lockstep.config import rules
from lockstep.config.resolve import find_run_file, parse_flags
from lockstep.config.rules import shared_values
from lockstep.config.saved_run import open_with_overrides, resume_step
from lockstep.config.schema import ResolvedRun, RunConfig
from lockstep.elastic.protocol.decisions import FIXED
from lockstep.elastic.run_folder import remove_untrained_run
from lockstep.errors import UsageError, require_text_packages
from lockstep.layout import choose_layout
from lockstep.log import log, set_up_logging
from lockstep.runtime.environment import (
    RankInfo,
    check_worker_count,
    default_worker_count,
    read_rank_info,
)
from lockstep.runtime.exit_report import worker_main
from lockstep.runtime.session_start import StartAgainError
from lockstep.runtime.signals import STOP_EXIT_CODES, SignalInbox
from lockstep.runtime.variables import PROFILE
from lockstep.runtime.worker_env import read_worker_env
from lockstep.tasks.layout_limits import layout_limits

if TYPE_CHECKING:
    from lockstep.elastic.runtime import ElasticRuntime


def start_here(request: RunRequest, given: int | None) -> int:
    """Be a worker if a launcher started this process as one, else the agent of this machine alone;
    return the exit code. given: number of workers."""
    if worker_env := read_worker_env(os.environ):
        from lockstep.cli.worker import run_under_agent  # loads torch: for workers only

        return run_under_agent(request, worker_env)
    rank_info = read_rank_info(os.environ)
    run = request.validate()
    if rank_info:
        refuse_other_worker_count(given, rank_info)
        from lockstep.cli.worker import run_worker  # loads torch: for workers only

        return worker_main(lambda: run_worker(request))
    workers, reason = choose_worker_count(given, run)
    refuse_layout(run, workers, reason)
    least = workers if request.restart == "all" else workers_per_replica(run)
    config = AgentConfig.for_this_machine(workers, least, max_workers(run, workers))
    return start_agent(request, run, config)


def run_in_group(
    words: Sequence[str],
    workers: int | None,
    function: Callable[[ElasticRuntime], int],
    modules: Sequence[str] = (),
    option: str = "--workers",
) -> int:
    """Run `function` in a fixed group of workers, one of which this process may be already.

    words    of the command, for the workers
    modules  that each worker imports
    option   that gives the number of workers
    """
    worker_env = read_worker_env(os.environ)
    rank_info = read_rank_info(os.environ)
    if rank_info:
        refuse_other_worker_count(workers, rank_info, option)
    elif not (worker_env and worker_env.is_child):
        program = WorkerProgram(tuple(words), preload=(*FIXED_PRELOAD, *modules))
        return run_fixed_group(program, workers or 1)

    def run() -> int:
        from lockstep.elastic.runtime import ElasticRuntime  # loads torch: for workers only

        with ElasticRuntime.join(threads=1, limits=FIXED) as runtime:
            set_up_logging(rank=runtime.world.rank)
            runtime.board.enter("preparing")  # as long as the function takes
            return function(runtime)

    return worker_main(run)


def start_agent(request: RunRequest, run: RunConfig | None, config: AgentConfig) -> int:
    """Be the agent of this machine; return the exit code of the run.
    config: where and with how many workers; this function adds the settings of the run.
    StartAgainError if a Session of a script needs another start."""
    env = config.env
    check_worker_count(env.slots, env.host)
    # "auto" is resolved once, by the workers: the resolved precision is no part of the request.
    values = (
        {key: text for key, text in shared_values(run).items() if key != "compute.precision"}
        if run
        else request.flags
    )
    command = {"script": request.script} | {f"--{key}": text for key, text in values.items()}
    command |= {"--restart": request.restart} if request.is_whole_script else {}
    script = "" if request.is_whole_script else request.script
    # A restarted worker resumes from the newest checkpoint, regardless of --resume.
    program = WorkerProgram(
        request.command_words(request.resume),
        request.command_words("auto"),
        preload=PRELOAD if request.script else RECIPE_PRELOAD,
        script=script,
    )
    policy = (
        replace(PLAIN_SCRIPT_POLICY, script=Path(request.script).name)
        if request.restart == "all"
        else config.policy
    )
    flags = request.flags if request.script else {}
    env = replace(env, flags=flags, words=request.command_words("auto"))
    config = replace(config, env=env, command=command, policy=policy)
    is_new = not request.folder.exists()
    code, text = run_until_end(program, request.folder, config)
    if again := StartAgainError.parse(text) if request.follows_session else None:
        is_alone = env.slots == env.expected_workers
        if (
            is_new
            and is_alone
            and again.out
            and not request.is_folder_given
            and Path(again.out) != request.folder.resolve()
        ):
            remove_untrained_run(request.folder)
        raise again
    if text:
        print(text, file=sys.stderr, flush=True)
    warn_if_not_profiled(request.folder, env.host)
    with SignalInbox():  # a late signal does not change the exit code
        write_at_end(request.folder, env.host, is_preempted=code == STOP_EXIT_CODES["SIGTERM"])
    return code


def warn_if_not_profiled(folder: Path, host: str) -> None:
    """Warn if --profile names steps that no Session trained. Only workers profile, and those of
    another host than that of the last rank 0 may all be on standby."""
    steps = os.environ.get(PROFILE)
    with suppress(OSError):  # the run is over
        if steps and not (folder / "profile").exists() and last_leader_host(folder) in ("", host):
            log.warning("--profile %s: no Session has trained these steps", steps)


def choose_worker_count(given: int | None, run: RunConfig | None) -> tuple[int, str]:
    """Return (workers of this machine, the reason). Log the reason unless the number was given."""
    if given is not None:
        return given, "--workers"
    workers, reason = default_worker_count()
    replica_size = workers_per_replica(run)
    if run and (replica_size > 1 or run.layout.replicate):
        workers, reason = (
            replica_size * (run.layout.replicate or max(1, workers // replica_size)),
            "as many as the layout takes",
        )
    log.info("%s: %s", f"{workers} workers" if workers > 1 else "1 worker", reason)
    return workers, reason


def workers_per_replica(run: RunConfig | None) -> int:
    return run.layout.axes.workers_per_replica if run else 1


def max_workers(run: RunConfig | None, workers: int) -> int:
    """Return the number of workers that a step has micro-batches for; `workers` for a user's
    loop."""
    return (
        run.data_parallel_limit // run.layout.shard * workers_per_replica(run) if run else workers
    )


def refuse_layout(run: RunConfig | None, workers: int, where: str) -> None:
    """UsageError, with the nearest valid layouts, if the layout does not suit `workers`
    processes."""
    if run is None:
        return
    layout, most = run.layout.axes, max_workers(run, workers)
    least = layout.workers_per_replica
    if (least == 1 or run.diloco.learners) and not least <= workers <= most:
        key, leaves = (
            ("diloco.learners", "learners")
            if run.diloco.learners
            else ("batch.micro_batches", "micro-batches")
        )
        raise UsageError(
            f"{workers} workers for a step of {run.leaves} {leaves}"
            + (f", each on layout.shard={least} workers" if least > 1 else ""),
            f"{where}; {key}",
            f"give {least} to {most} workers, or more {leaves}",
        )
    choose_layout(layout, workers, layout_limits(run), f"{where}; [layout] of the run")


def refuse_other_worker_count(given: int | None, info: RankInfo, option: str = "--workers") -> None:
    """UsageError if an option differs from the number of workers that another launcher started."""
    if given not in (None, info.size):
        raise UsageError(
            f"{option} {given} does not match the launch environment: {info}",
            "command line and environment",
            f"remove {option}, or start {given} workers",
        )


@dataclass(frozen=True)
class RunRequest:
    script: str  # the user's FILE.py:FUNCTION, or FILE.py as a whole; "": the built-in loop
    run_file: Path | None
    folder: Path
    resume: str
    # Words `--section.key VALUE`, flags of the function, or arguments of the script.
    values: list[str]
    overrides: tuple[str, ...] = ()  # the KEY=VALUE words of --override
    restart: str = "one"  # workers to restart when a script loses one: "one" or "all"
    module: str = ""  # name of the whole script for python -m; "": python FILE.py
    is_folder_given: bool = False  # by --out, for a whole script
    # A Session in a whole script may ask for a start under an agent, or in its folder
    follows_session: bool = False

    @property
    def flags(self) -> dict[str, str]:
        """`values` by name. ConfigError."""
        if self.is_whole_script:
            return {"arguments": shlex.join(self.values)}
        return parse_flags(self.values)

    @property
    def is_whole_script(self) -> bool:
        return self.script.endswith(".py")

    @property
    def script_words(self) -> tuple[str, ...]:
        """The words of Python that run the whole script."""
        return ("-m", self.module) if self.module else (self.script,)

    def open(self, resume: str) -> ResolvedRun:
        """Return the configuration, with overrides from the checkpoint that `resume` names."""
        return open_with_overrides(self.folder, self.run_file, self.flags, resume, self.overrides)

    def validate(self) -> RunConfig | None:
        """Check what can be checked alone. Return the configuration; None for a script."""
        if self.script:
            if not self.is_whole_script:
                parse_flags(self.values)
            return None
        resolved = self.open(self.resume)
        rules.refuse_missing_packages(
            resolved, prepared=(self.folder / "data" / "prepared.json").exists()
        )
        resume_step(self.folder, self.resume)
        return resolved.run

    def command_words(self, resume: str) -> tuple[str, ...]:
        """Return the words with which `lockstep` starts a worker of this run."""
        if self.is_whole_script:
            follow = ["--follow-session"] if self.follows_session else []
            return (
                "run",
                "--restart",
                self.restart,
                "--out",
                str(self.folder),
                *follow,
                *self.script_words,
                "--",
                *self.values,
            )
        name = self.script or self.run_file
        target = [str(name)] if name else []
        target += [f"--override={word}" for word in self.overrides]
        return "train", *target, "--out", str(self.folder), "--resume", resume, *self.values

    def launch_words(self, *, has_folder: bool = False) -> tuple[str, ...]:
        """Return the words for `lockstep launch` on another host, after its options about hosts.

        Without what a Session may still change, so that each host starts again by itself.
        has_folder: with the folder in any case, because the caller watches it
        """
        if not self.is_whole_script or not self.follows_session:
            return self.command_words(self.resume)[1:]
        restart = ["--restart", self.restart] if self.restart == "one" else []
        out = ["--out", str(self.folder)] if has_folder or self.is_folder_given else []
        return *restart, *out, *self.script_words, "--", *self.values


def read_request(args: argparse.Namespace, rest: list[str]) -> RunRequest:
    """Return the request of `train` or `launch`. UsageError for options that do not apply to it."""
    script = args.target if is_script(args.target) else ""
    if script:
        refuse_run_options(args, script)
    if script.endswith(".py"):
        return read_script_request(args, script, rest)
    if restart := vars(args).get("restart"):
        raise UsageError(
            f"--restart {restart} applies to a script only",
            "command line",
            "write lockstep launch FILE.py",
        )
    run_file = find_run_file(Path(args.target)) if args.target and not script else None
    folder = args.out or Path("runs") / (run_file.stem if run_file else "default")
    return RunRequest(
        script,
        run_file,
        folder,
        args.resume,
        rest,
        tuple(args.override),
    )


def read_script_request(args: argparse.Namespace, name: str, arguments: list[str]) -> RunRequest:
    """Return the request of `run` or `launch` with a script. UsageError if it cannot be read."""
    if args.command not in ("run", "launch"):
        raise UsageError(
            f"{name!r} names no function",
            "command line",
            "write FILE.py:FUNCTION, such as examples/own_loop.py:main; "
            f"a whole script: lockstep run {name}",
        )
    file, module = Path(name), args.module or ""
    is_decided = args.restart and args.out  # as for workers
    script, *imported = [read_script(file)] if is_decided else read_sources(file, module)
    if any(map(imports_recipes, [script, *imported])):
        require_text_packages(f"{name} imports lockstep.recipes")
    folder = folder_of(file, [script, *imported], args.out, arguments)
    restart = args.restart or (
        "one" if imports_lockstep(script) or any(map(opens_session, imported)) else "all"
    )
    may_change = args.restart is None if restart == "all" else args.out is None
    return RunRequest(
        name,
        None,
        folder,
        "auto",
        arguments,
        restart=restart,
        module=module,
        is_folder_given=args.out is not None,
        follows_session=may_change or getattr(args, "follow_session", False),
    )


def refuse_run_options(args: argparse.Namespace, script: str) -> None:
    """UsageError for an option of a run file that a script does not receive."""
    options = vars(args)
    refused = {
        "--resume": (
            options["resume"] != "auto",
            "the script chooses the checkpoint: Checkpointer.resume(...)",
        ),
        "--override": (
            bool(options["override"]) and script.endswith(".py"),
            "write it behind FILE.py: lockstep.launch(main) takes the values of its function",
        ),
        "--show": (bool(options.get("show")), "its values are the arguments of its function"),
        "--with-evaluator": (
            bool(options.get("with_evaluator")),
            "evaluate in the loop: Lockstep does not know its model",
        ),
    }
    for option, (given, hint) in refused.items():
        if given:
            raise UsageError(
                f"{option} is for a run file, and {script} is a user script", "command line", hint
            )
