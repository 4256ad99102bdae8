"""Refuse, or warn of, trained parameters and schedulers that checkpoints do not cover."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor

from lockstep.checkpoint.json_tree import JSON_SUFFIX, unpack
from lockstep.checkpoint.state_dict import model_name, named_tensors
from lockstep.checkpoint.stateful import (
    GROUPS,
    Stateful,
    Trained,
    plain_values,
    unregistered_schedulers,
)
from lockstep.errors import CheckpointError, UsageError
from lockstep.units import join_names

log = logging.getLogger("lockstep")


def refuse_misplaced_parameters(trained: Trained) -> None:
    """UsageError when optimizers hold parameters of another model, or the same ones."""
    try:
        trained.parameters()
    except CheckpointError as error:
        raise UsageError(*error.args) from None


def warn_of_other_options(
    trained: Trained, tensors: Mapping[str, Tensor], before: Sequence[Mapping[str, str]] = ()
) -> None:
    """Warn of options (lr, momentum, ...) that the loaded state replaces by other values.

    Where a scheduler changes lr, momentum and betas, these are not compared.
    before  the options of each group as the run that saved the state has constructed them: where
            they are the same now, the loop has changed them
    """
    if f"{GROUPS}{JSON_SUFFIX}" not in tensors:
        return
    loaded, own = unpack(GROUPS, tensors), trained.describe_groups()
    constructed = iter(before)
    for saved_optimizer, optimizer in zip(loaded, own, strict=False):
        differences: list[str] = []
        for saved, group in zip(saved_optimizer["groups"], optimizer["groups"], strict=False):
            scheduled = {"lr", "momentum", "betas"} if "initial_lr" in group else set()
            known = next(constructed, {})
            for key, value in group.items():
                is_own = key in {"params", *scheduled} or known.get(key) == repr(value)
                if is_own or key not in saved or isinstance(value, Tensor):
                    continue
                if value != saved[key]:
                    what = f"{key} is {saved[key]} from the checkpoint, not {value} as constructed"
                    differences.append(what)
        if differences:
            listed = "; ".join(dict.fromkeys(differences))
            log.warning("optimizer %s: %s", optimizer["class"], listed)


def constructed_options(trained: Trained) -> list[dict[str, Any]]:
    """Return the options of each parameter group, before a checkpoint replaces them."""
    return [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in trained.param_groups()
    ]


def options_as_text(options: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [{key: repr(value) for key, value in group.items()} for group in options]


def apply_options(
    trained: Trained,
    constructed: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, str]],
) -> None:
    """Set the options that were constructed otherwise before: described as `before`."""
    for group, new, old in zip(trained.param_groups(), constructed, before, strict=False):
        group |= {key: value for key, value in new.items() if old.get(key) != repr(value)}


def warn_of_other_constants(
    state: Mapping[str, Stateful],
    constructed: Mapping[str, Mapping[str, Any]],
    paths: Mapping[str, Sequence[str]],
    overridden: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Warn of values that the loaded state has replaced, and that training does not change: those
    at `paths`. Return the loaded ones, and of objects without paths those `constructed`.

    UsageError instead of a warning when the user has `overridden` values of the run.
    """
    constants = {name: dict(values) for name, values in constructed.items()}
    for name in state.keys() & paths.keys():
        loaded = dict(plain_values(state[name].state_dict()))
        constants[name] = {path: loaded[path] for path in paths[name] if path in loaded}
        own = constructed[name]
        differing = [
            f"{path} is {value} from the checkpoint, {own[path]} as constructed"
            for path, value in constants[name].items()
            if path in own and own[path] != value
        ]
        if differing:
            listed = join_names(differing)
            hint = (
                "for another schedule set the rate in each step before optimizer.step(): "
                "group['lr'] = rate(step)"
            )
            if overridden:
                raise UsageError(
                    f"--override of {', '.join(overridden)} "
                    f"does not reach {name} in session.state: {listed}",
                    "the checkpoint's values hold",
                    hint,
                )
            log.warning("%s: %s; the checkpoint's values hold; %s", name, listed, hint)
    return constants


def refuse_unsaved(trained: Trained, *, is_stateful: bool) -> None:
    """UsageError for trained parameters and schedulers that no checkpoint would hold.

    is_stateful  checkpoints hold objects besides the model and the optimizers
    """
    known = trained.parameters()
    if unsaved := [name for name in trained.trained_names() if name not in known]:
        names = ", ".join(type(optimizer).__name__ for optimizer in trained.optimizers)
        raise UsageError(
            f"{len(unsaved)} trained parameters are in no optimizer "
            f"that session.prepare has received: {join_names(unsaved)}",
            f"{model_name(trained.model)}, trained by {names or 'no optimizer'}",
            "pass their optimizer: session.prepare(model, optimizer), "
            "or freeze them with requires_grad_(False)",
        )
    if is_stateful and (unregistered := unregistered_schedulers(trained.optimizers, trained.state)):
        scheduler, optimizer = unregistered[0], unregistered[0].optimizer
        raise UsageError(
            f"{type(scheduler).__name__} sets the learning rate of {type(optimizer).__name__}, "
            "and session.state has not received it",
            "after a resume, and in a worker that joins, "
            "the scheduler would start from the beginning",
            "name it: session.state(scheduler=scheduler)",
        )


def refuse_new_groups(trained: Trained, before: Sequence[Sequence[int]], step: int) -> None:
    """UsageError: parameter groups have changed since the first step.

    before  ids of the parameters in each group
    """
    refuse_misplaced_parameters(trained)
    names = {id(tensor): name for name, tensor in named_tensors(trained.model).items()}
    old = {number for group in before for number in group}
    now = [p for group in trained.param_groups() for p in group["params"]]
    new = [names.get(id(p), f"shape {tuple(p.shape)}") for p in now if id(p) not in old]
    changes = join_names(new) or "some were removed or reordered"
    raise UsageError(
        f"the parameter groups changed during the run, before step {step + 1}: {changes}",
        "a resumed run builds its optimizers without this change, "
        "and could not load the checkpoints",
        "give all parameters to the optimizers before the loop, and let the step decide what "
        "is trained: layer.requires_grad_(step >= 300), or group['lr'] = rate(step)",
    )


def warn_if_changed(before: Sequence[str] | None, trained: Trained) -> None:
    """Warn when the first step after a resume trains other layers than the last step before.

    That is right only where the loop freezes or unfreezes in this very step: `if step == 300:
    unfreeze()` does not run again.
    """
    if before is not None and (changed := sorted(set(trained.trained_names()) ^ set(before))):
        log.warning(
            "the checkpoint was trained with other layers frozen: %s changed since; "
            "right if the loop freezes or unfreezes them in this step, else let requires_grad "
            "follow from the step: layer.requires_grad_(step >= 300)",
            join_names(changed),
        )
