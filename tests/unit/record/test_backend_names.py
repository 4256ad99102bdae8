"""Metric backends by name: Session(track=[...]), --track and the section [track] of a run."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.record.tracker import options_of


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ([], {"project": "lockstep"}),
        (["tensorboard", "wandb"], {"tensorboard": True, "wandb": "online", "project": "lockstep"}),
        (["wandb:offline"], {"wandb": "offline", "project": "lockstep"}),
        (["wandb:online:my: words"], {"wandb": "online", "project": "my: words"}),
        (["mine:Sink"], {"backend": "mine:Sink", "project": "lockstep"}),
    ],
)
def test_names_are_arguments_of_a_tracker(
    names: list[str], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert options_of(names, "here") == options
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")
    if options["project"] == "lockstep":
        options = options | {"project": "of the environment"}
    assert options_of(names, "here") == options


@pytest.mark.parametrize("names", [["nothing"], ["a:B", "c:D"]])
def test_other_names_are_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match=f"{names[-1]!r} is "):
        options_of(names, "Session(track=...)")
