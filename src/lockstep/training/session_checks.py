"""Refusals of a Session before it trains."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.checkpoint.stateful import Trained
from lockstep.errors import UsageError
from lockstep.record.tracker import parse_backends
from lockstep.runtime.environment import RESERVED_VARIABLES
from lockstep.runtime.session_start import ask_for_start
from lockstep.runtime.variables import LAYOUT, PROFILE, TRACK, unknown_variables
from lockstep.runtime.worker_env import WorkerEnv
from lockstep.training.replica_group import ReplicaOptions
from lockstep.training.trained_parameters import refuse_misplaced_parameters
from lockstep.units import join_names

if TYPE_CHECKING:
    from lockstep.training.profiler import ProfiledSteps
    from lockstep.training.rollback import Rollback

log = logging.getLogger("lockstep")


def refuse_wrong_options(
    session: type, micro_batches: int, on_save_error: str, options: Mapping[str, Any]
) -> None:
    """UsageError for invalid arguments of `session`, and for names that it does not take."""
    kinds = get_type_hints(ReplicaOptions)
    if unknown := sorted(options.keys() - kinds.keys()):
        names = [*inspect.signature(session).parameters, *kinds]
        raise UsageError(
            f"Session takes no {unknown[0]}",
            "Session(out, ...)",
            f"did you mean {' or '.join(get_close_matches(unknown[0], names) or names)}?",
        )
    kinds["on_save_error"] = Literal["continue", "stop"]
    for name, value in {**options, "on_save_error": on_save_error}.items():
        words = get_args(kinds[name])
        if get_origin(kinds[name]) is Literal and value not in words:
            raise UsageError(
                f"{name}={value!r}",
                f"Session({name}=...)",
                f"give {' or '.join(map(repr, words))}; help(lockstep.Session) explains them",
            )
    if micro_batches < 1:
        raise UsageError(
            f"micro_batches={micro_batches}",
            "Session(micro_batches=...)",
            "give at least one for each worker",
        )


def choose_backends(track: Sequence[str]) -> list[str]:
    """Return the backends of Session(track=...) and of the command line."""
    if isinstance(track, str):
        raise UsageError(
            f"track={track!r} is a text", "Session(track=...)", f"write track=[{track!r}]"
        )
    asked = [name for name in os.environ.get(TRACK, "").split(",") if name]
    where = f"Session(track=...), --track or {TRACK}"
    names = list(dict.fromkeys([*track, *asked]))
    parse_backends(names, where)
    return names


def refuse_ineffective_variables(environ: Mapping[str, str]) -> None:
    """UsageError for variables of Lockstep that a Session does not read: values of recipes, or
    typos."""
    axes = LAYOUT.values()
    known = [*RESERVED_VARIABLES, *axes]
    if others := unknown_variables(environ, known):
        near = get_close_matches(others[0], known, n=1)
        hint = f"unset it; a Session reads {' and '.join(near or axes)}, and its own arguments"
        if others[0].startswith(f"{TRACK}_"):
            hint = f"write Session(track=[...]), lockstep run --track NAME or {TRACK}=NAME"
        raise UsageError(
            f"{join_names(others)} would have no effect on a Session", "environment", hint
        )


def rollback_of(
    on_divergence: Literal["stop", "rollback"] | Rollback,
    micro_batches: int,
    options: ReplicaOptions,
) -> Rollback | None:
    """Return the options of Session(on_divergence=...); None: a divergence ends the run."""
    if on_divergence == "stop":
        return None
    from lockstep.training.rollback import choose_rollback

    return choose_rollback(on_divergence, micro_batches, options.get("on_nonfinite", "raise"))


def profiled_steps() -> ProfiledSteps | None:
    """Return the steps of `lockstep run --profile`; None: no profile."""
    text = os.environ.get(PROFILE, "")
    if not text:
        return None
    from lockstep.training.profiler import ProfiledSteps

    return ProfiledSteps.parse(text)


def refuse_two_values(model: nn.Module | None) -> None:
    """UsageError for a model with `init` that has values: they would be replaced."""
    named = [*model.named_parameters(), *model.named_buffers()] if model else []
    if names := [name for name, tensor in named if not tensor.is_meta]:
        raise UsageError(
            f"`init` would replace the values of {join_names(names)}",
            "session.prepare(model, init=...)",
            'build the model on the meta device: with torch.device("meta"); or leave out `init`',
        )


def parse_mfu(mfu: float | bool) -> float | bool:
    """Return Session(mfu=...). UsageError for what is no number of operations."""
    if isinstance(mfu, bool) or (isinstance(mfu, int | float) and 0 < mfu < float("inf")):
        return mfu
    raise UsageError(
        f"mfu={mfu!r}",
        "Session(mfu=...)",
        "give True to count the operations, or their number for each sample or token",
    )


def refuse_second_session(
    out: Path, opened: Sequence[Path], entered: bool, worker_env: WorkerEnv | None
) -> None:
    """UsageError when this process has a Session open, or has an agent and `entered` one before or
    is in another run folder. SystemExit where `lockstep run` then starts again (ask_for_start)."""
    if opened:
        raise UsageError(
            "a second Session is open in this process",
            f"Session({str(out)!r}) inside Session({str(opened[0])!r})",
            "close the first one, or start another process",
        )
    is_elsewhere = worker_env is not None and Path(worker_env.folder) != out.resolve()
    if not entered and (worker_env is None or is_elsewhere):
        ask_for_start(out)
    if worker_env and entered:
        raise UsageError(
            "an agent runs one Session per start, and this is the second one",
            f"a second Session({str(out)!r}) in this process",
            "start the script once for each of them, "
            f"lockstep run --out {out} FILE.py ..., or start it with torchrun",
        )
    if worker_env and is_elsewhere:
        raise UsageError(
            f"this Session's folder is {out}, the run's is {worker_env.folder}",
            "Session(out, ...), and the folder that lockstep was started with",
            f"start it with --out {out}: lockstep run --out {out} FILE.py, or let the "
            "script take --out; a folder with the time in its name is another one in each worker",
        )


def refuse_different_folders(folders: Sequence[str]) -> None:
    """UsageError when ranks that no agent started give different folders."""
    if len(set(folders)) > 1:
        listed = ", ".join(f"{folder} on rank {rank}" for rank, folder in enumerate(folders))
        raise UsageError(
            f"the Session's folder differs: {listed}",
            "Session(out, ...)",
            "give one folder, without the rank or the time",
        )


def refuse_unprepared(model: Any, optimizers: Sequence[Any], init: object = None) -> None:
    """UsageError unless these are a module and the optimizers of its parameters."""
    refuse_two_values(model if init else None)
    where = "session.prepare(model, optimizer)"
    is_module = isinstance(model, nn.Module)
    if not is_module or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        names = ", ".join(type(argument).__name__ for argument in (model, *optimizers))
        raise UsageError(
            "session.prepare takes one module, then optimizers of torch",
            f"session.prepare({names})",
            f"write {where}",
        )
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"the model is wrapped in {type(model).__name__}, "
            "which would sum its gradients a second time",
            "session.prepare(...)",
            f"pass the module itself: {where}",
        )
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise UsageError(
                f"{name} has not called the constructor of torch.optim.Optimizer",
                where,
                "call super().__init__(params, defaults) in its __init__",
            )
        if needs_closure(optimizer):
            raise UsageError(
                f"{name}.step needs a closure that computes the loss again, "
                "and a step runs its micro-batches once",
                where,
                "use an optimizer whose step() needs no argument",
            )
    refuse_misplaced_parameters(Trained(model, optimizers, {}))


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step()` without an argument is an error."""
    # A scheduler wraps the method of the instance.
    signature = inspect.signature(type(optimizer).step)
    _, *parameters = signature.parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in variable for p in parameters)


def refuse_ended(was_entered: bool, *, is_open: bool) -> None:
    """UsageError: the loop is outside of the with block of its Session."""
    if was_entered and not is_open:
        raise UsageError(
            "session.steps was called after the Session ended",
            "the loop is below `with lockstep.Session(...) as session`",
            "indent the loop, so that it is inside",
        )


def refuse_finished(before: int | None, total: int, step: int) -> None:
    """UsageError for session.steps once more with a total that the run has reached by then."""
    if before is not None and total <= min(before, step):
        raise UsageError(
            f"session.steps({total}) again trains nothing: it counts the steps of the whole run",
            f"the loop before, session.steps({before}), ended at step {step}",
            "in a loop over epochs: session.steps((epoch + 1) * steps_of_an_epoch)",
        )


def refuse_early_use(name: str) -> None:
    """UsageError: the attribute exists only later."""
    if name == "runtime":
        raise UsageError(
            "this Session is not open: session.world and session.runtime do not exist yet",
            "the `with` statement of a Session opens it, and joins the workers",
            "write `with lockstep.Session(...) as session:`, and indent the lines that use it",
        )
    if name in ("replicas", "checkpointer", "tracker"):
        raise UsageError(
            f"session.{name} does not exist yet",
            "session.steps(...) creates it at its first step",
            "move the line into the loop",
        )
