"""Metric backends by name: Session(track=[...]), --track and the section [track] of a run."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.record.tracker import BackendOptions, parse_backends


@pytest.mark.parametrize("project", ["lockstep", "of the environment"])
def test_names_have_options(project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if project == "lockstep":
        monkeypatch.delenv("WANDB_PROJECT", raising=False)
    else:
        monkeypatch.setenv("WANDB_PROJECT", project)
    assert parse_backends([], "here") == {}
    both = parse_backends(["tensorboard", "wandb"], "here")
    assert list(both) == ["tensorboard", "wandb"]
    assert both["wandb"] == BackendOptions("online", project)
    offline = parse_backends(["wandb:offline"], "here")
    assert offline == {"wandb": BackendOptions("offline", project)}
    named = parse_backends(["wandb:online:my: words"], "here")
    assert named == {"wandb": BackendOptions("online", "my: words")}
    assert list(parse_backends(["mine:Sink"], "here")) == ["mine:Sink"]


@pytest.mark.parametrize("names", [["nothing"], ["a:B", "c:D"]])
def test_other_names_are_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match=f"{names[-1]!r} is "):
        parse_backends(names, "Session(track=...)")
