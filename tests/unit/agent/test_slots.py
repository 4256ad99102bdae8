"""The generations that an agent reads after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.agent import slots
from lockstep.agent.lock import PriorState
from lockstep.agent.slots import EventLog, GenerationReader
from lockstep.elastic.generation_log import Generation, GenerationLog, Member, Removed
from lockstep.runtime.worker_env import ProcessIdentity

STAYS, REMOVED, WAITS = 11, 12, 13  # pids
NEWEST, LAST_OF_REMOVED = 60, 50


@pytest.fixture
def log(tmp_path: Path) -> GenerationLog:
    """A log of 60 generations: worker 12 is removed in generation 51."""
    (tmp_path / "generations").mkdir()
    log = GenerationLog(tmp_path / "generations")
    members = [
        Member(f"here/{slot}/x", "here", slot, pid, "127.0.0.1:1")
        for slot, pid in enumerate((STAYS, REMOVED))
    ]
    for number in range(1, NEWEST + 1):
        out = (Removed("here/1/x", "silent"),) if number == LAST_OF_REMOVED + 1 else ()
        log.propose(
            Generation(
                number,
                str(number),
                tuple(members[: 1 + (number <= LAST_OF_REMOVED)]),
                "",
                number,
                "",
                out,
            )
        )
    return log


def read_after_restart(log: GenerationLog, *pids: int) -> list[tuple[int, int]]:
    """Return (generation, the one before it) for each that the next agent of these workers reads."""
    newest = log.newest()
    prior = PriorState(newest, 1, {slot: ProcessIdentity(pid, 0) for slot, pid in enumerate(pids)})
    reader = GenerationReader(prior, EventLog(Path(log.folder.where).parent, "here"))
    return [(record.number, before.number) for record, before in reader.read_new()]


def test_only_the_newest_generation_is_read_if_it_has_all_workers(log: GenerationLog) -> None:
    assert read_after_restart(log, STAYS) == [(NEWEST, NEWEST - 1)]


def test_removal_that_no_agent_saw_is_read(log: GenerationLog) -> None:
    assert read_after_restart(log, STAYS, REMOVED) == [
        (number, number - 1) for number in range(LAST_OF_REMOVED, NEWEST + 1)
    ]


def test_search_for_a_waiting_worker_ends(
    log: GenerationLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(read_after_restart(log, STAYS, WAITS)) == NEWEST - 1
    monkeypatch.setattr(slots, "KEEP", 20)
    assert len(read_after_restart(log, STAYS, WAITS)) == 20


def test_generation_is_read_once(log: GenerationLog) -> None:
    newest = log.newest()
    reader = GenerationReader(
        PriorState(newest, NEWEST, {}), EventLog(Path(log.folder.where).parent, "here")
    )
    assert list(reader.read_new()) == []
    log.propose(Generation(NEWEST + 1, "x", newest.members, "", NEWEST, ""))
    assert [(record.number, before.number) for record, before in reader.read_new()] == [
        (NEWEST + 1, NEWEST)
    ]
    assert list(reader.read_new()) == []
