"""A run of 10,000 generations costs a start, a status and a survivor no more than a run of a few."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.many_members import make_member

from lockstep.elastic import generation_log
from lockstep.elastic.control import read_newest
from lockstep.elastic.generation_log import NO_GENERATION, Generation, GenerationLog, Member
from lockstep.elastic.protocol.decisions import ElasticLimits, LeaveReport
from lockstep.elastic.protocol.state import Effect, Propose
from lockstep.elastic.protocol.transitions import Protocol
from lockstep.elastic.run_folder import create_run_folder
from lockstep.object_store import storage

accesses: Counter[str] | None = None  # while not None, file accesses are counted


def count_access(event: str, arguments: tuple[Any, ...]) -> None:
    if accesses is None or event not in ("open", "os.listdir"):
        return
    accesses[event] += 1
    if event == "os.listdir":
        accesses["entries"] += (
            sum(1 for _ in Path(arguments[0]).iterdir()) if accesses["os.listdir"] == 1 else 0
        )


@contextmanager
def counted() -> Iterator[Counter[str]]:
    global accesses
    accesses = counter = Counter[str]()
    try:
        yield counter
    finally:
        accesses = None


class Survivor:
    """Worker 0 of a run whose other worker is replaced in every second generation."""

    def __init__(self, folder: Path) -> None:
        self.log = GenerationLog(folder)
        self.protocol = Protocol(make_member(0), ElasticLimits(), lambda: os.urandom(8).hex(), 0.0)
        self.now_s, self.joined = 0.0, 0
        self.do(self.protocol.request_join, {})
        self.do(self.protocol.on_log_read, NO_GENERATION, [])
        self.protocol.set_fingerprint({"torch": "2.13"}, self.now_s)

    def do(self, event: Callable[..., list[Effect]], *values: Any) -> None:
        """Process one event; write a proposal to the log, and adopt it."""
        now_s = (self.now_s,)
        effects = (
            event(*now_s, *values)
            if event == self.protocol.request_join
            else event(*values, *now_s)
        )
        effects += self.protocol.advance(self.now_s)
        for effect in effects:
            if isinstance(effect, Propose):
                self.do(self.protocol.on_proposed, self.log.propose(effect.generation))

    def leave(self) -> None:
        self.do(
            self.protocol.on_group_left, LeaveReport(self.protocol.number, self.protocol.number)
        )

    def replace_peer(self) -> Member:
        """A worker joins, trains and exits: two generations."""
        self.joined += 1
        peer = replace(make_member(1), id=f"h0000/1/{self.joined:08x}")
        self.now_s += 1.0
        self.do(self.protocol.tick)
        self.do(self.protocol.on_link_up, peer.id)
        request = {
            "member": vars(peer),
            "fingerprint": {"torch": "2.13"},
            "reaches": [self.protocol.me.id],
        }
        self.do(
            self.protocol.on_message,
            peer.id,
            {"kind": "join", "number": self.protocol.number, **request},
        )
        self.leave()
        left = {
            "kind": "left",
            "step": -1,
            "leaving": False,
            "why": "",
            "lost": [],
            "dead": {},
            "partition_suspected": False,
        }
        assert self.protocol.generation and self.protocol.generation.members == (
            self.protocol.me,
            peer,
        )
        self.do(
            self.protocol.on_message, peer.id, {**left, "number": self.protocol.number - 1}
        )  # a late one
        self.do(self.protocol.on_link_down, peer.id)
        self.do(self.protocol.on_connect_failed, peer.id, True)
        self.leave()
        assert self.protocol.generation.members == (self.protocol.me,)
        return peer

    def sizes(self) -> dict[str, int]:
        """The size of each container of the protocol."""
        protocol = self.protocol
        parts = vars(protocol) | vars(protocol.peers) | vars(protocol.outbox)
        return {
            name: len(value)
            for name, value in parts.items()
            if isinstance(value, (dict, set, list, tuple))
        }


@pytest.mark.slow
def test_ten_thousand_generations_cost_no_more_than_a_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # for speed: no power is cut here
    sys.addaudithook(count_access)
    create_run_folder(tmp_path, "here")
    survivor = Survivor(tmp_path / "generations")
    starts, sizes = [], []
    for generations in (1_200, 10_000):
        while survivor.protocol.number < generations:
            survivor.replace_peer()
        with counted() as status:
            newest, _ = read_newest(tmp_path)
        with counted() as poll:
            assert not survivor.log.newest(survivor.protocol.number).number
        assert newest == survivor.protocol.generation and not poll
        starts.append(dict(status))
        sizes.append(survivor.sizes())
    assert starts[0] == starts[1] and starts[0]["entries"] <= generation_log.KEEP + 2, starts
    assert sizes[0] == sizes[1] and max(sizes[1].values()) < 10, sizes
    reader = GenerationLog(tmp_path / "generations")
    numbers = range(1, survivor.protocol.number + 1)
    assert all(reader.read(number).number == number for number in numbers), "no generation is lost"


def test_stale_reader_finds_generations_that_were_archived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_log, "KEEP", 3)
    log, stale = GenerationLog(tmp_path), GenerationLog(tmp_path)
    for number in range(1, 10):
        log.propose(Generation(number, f"token {number}", (make_member(0),), "", 0, ""))
        if number == 2:
            assert stale.newest() == log.read(2)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        f"{number:06d}.json" for number in (7, 8, 9)
    ]
    assert stale.newest(2) == log.read(9) and stale.read(3).token == "token 3"
    for path in tmp_path.glob("*.json"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="the log lacks generation 9"):
        stale.newest(9)


def test_proposal_of_an_archived_number_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_log, "KEEP", 3)
    log, stopped = GenerationLog(tmp_path), GenerationLog(tmp_path)
    late = Generation(2, "late", (make_member(1),), "", 0, "")
    log.propose(replace(late, number=1, token="token 1"))
    create = storage.DiskStorage.create

    def create_after_a_stop(folder: storage.DiskStorage, name: str, content: bytes) -> bytes:
        monkeypatch.setattr(storage.DiskStorage, "create", create)
        for number in range(2, 10):
            log.propose(replace(late, number=number, token=f"token {number}"))
        return create(folder, name, content)

    monkeypatch.setattr(storage.DiskStorage, "create", create_after_a_stop)
    assert stopped.propose(late).token == "token 2", "the winner of a number stays the winner"
    assert stopped.newest(2) == log.read(9) and not (tmp_path / "000002.json").exists()
    assert stopped.propose(replace(late, number=3)).token == "token 3"
