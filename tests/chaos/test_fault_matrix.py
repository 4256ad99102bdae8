"""The fault matrix: what is done to a run, when, and what must follow.

Every row ends with `judge`: the same bits, each step once, no process, port or file left over.

The number of a row is the first part of each test's name in brackets. Time bounds are far below the time-out that would otherwise have
ended the wait (600 s in a collective), since machines differ; what was measured is printed (pytest -rP).

Rows that are tested elsewhere, or cannot be:

    38-40       tests/chaos/test_checkpoint_kill.py: death at every place of a save
    42, 43, 50  tests/chaos/test_checkpoint_disk.py
    44, 45, 49  tests/chaos/test_checkpoint_damage.py
    46, 47      tests/chaos/test_checkpoint_kill.py and _damage.py: a reader and retention
    48          tests/chaos/test_checkpoint_damage.py: another committer between our check and our commit
    51          tests/chaos/test_hang_verdicts.py, in a user's own loop: our own workers read the mapped corpus themselves

The short part has a kill at every place of every step, and one row of each kind; the rest needs LOCKSTEP_CHAOS=1.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.hosts import HERE, Host, Network, Training, Truth, undisturbed, why_no_hosts

from lockstep.checkpoint.commands import digest_line

OWN_LOOP = f"{Path(__file__).parents[2] / 'examples' / 'own_loop.py'}:train"
STEPS = 40
SOON_S = 20.0  # far below the 600 s of a collective, far above what it takes
Start = Callable[..., Training]
long = pytest.mark.skipif(os.environ.get("LOCKSTEP_CHAOS") != "1", reason="the long part of the fault matrix: LOCKSTEP_CHAOS=1")


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Truth]:
    """What a run of so many steps comes to undisturbed, computed once for all processes that test."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def find(steps: int = STEPS) -> Truth:
        folder = base / f"undisturbed-{steps}"
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = folder / "truth.json"
            if not kept.exists():
                kept.write_text(json.dumps(asdict(undisturbed(folder, steps))))
            values = json.loads(kept.read_text())
            return Truth(values["digest"], [(step, loss, norm) for step, loss, norm in values["steps"]])

    return find


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts trainings, and ends what they leave."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    started: list[Training] = []

    def start_one(*args: Any, **values: Any) -> Training:
        started.append(Training(tmp_path, *args, **{"steps": STEPS} | values))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The run folder, as a disk of its own."""
    image, folder = tmp_path / "disk.ext4", tmp_path / "run"
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    folder.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def may_have_hosts() -> str:
    return why_no_hosts()


@pytest.fixture
def network(may_have_hosts: str) -> Iterator[Network]:
    """Three hosts."""
    if may_have_hosts:
        pytest.skip(may_have_hosts)
    with Network(3) as made:
        yield made


def tell(**seconds: float) -> None:
    """Show what was measured."""
    print("; ".join(f"{what.replace('_', ' ')} {value:.2f} s" for what, value in seconds.items()))


# One worker dies.


@pytest.mark.parametrize(
    "at",
    [
        pytest.param({"at": "forward"}, id="1-forward"),
        pytest.param({"at": "backward"}, id="1-backward"),
        pytest.param({"at": "collective"}, id="2-first bucket"),
        pytest.param({"at": "collective", "after": 1}, id="2-between buckets"),
        pytest.param({"at": "reducing"}, id="2-last bucket"),
        pytest.param({"at": "voting"}, id="3-after the reduction"),
        pytest.param({"at": "updating"}, id="4-in the update"),
    ],
)
@long
def test_a_worker_killed_inside_a_step_costs_at_most_this_step(start: Start, truth: Callable[..., Truth], at: Any) -> None:
    one = start()
    one.wait_for_step(8)
    before = one.newest
    one.inject_fault(1, "kill", step=12, **at)
    back_s = one.wait_for_step(13)
    whole_s = one.wait_until_whole(before)
    tell(back=back_s, whole=back_s + whole_s)
    after = one.log.read(before.number + 1)
    assert len(after.members) == 2 and after.step in (11, 12) and back_s < SOON_S
    one.assert_same_bits(truth())


def test_5_the_worker_that_leads_and_holds_the_store_is_killed(start: Start, truth: Callable[..., Truth]) -> None:
    one = start()
    one.wait_for_step(12)
    before, step = one.newest, one.step
    one.kill(one.leader)
    back_s = one.wait_until_back(before)
    tell(back=back_s, whole=back_s + one.wait_until_whole(before))
    assert one.log.read(before.number + 1).step >= step and back_s < SOON_S
    one.assert_same_bits(truth())


@pytest.mark.parametrize("after", [pytest.param(0, id="6-left the old group", marks=long), pytest.param(1, id="6-forming the new group")])
def test_the_worker_that_leads_is_killed_while_a_group_forms(start: Start, truth: Callable[..., Truth], after: int) -> None:
    one = start()
    one.wait_for_step(8)
    before = one.newest
    one.request_fault(one.leader.slot, "kill", at="joining", after=after)
    one.inject_fault(2, "kill", at="backward", step=12)
    back_s = one.wait_for_step(13)
    tell(back=back_s, whole=back_s + one.wait_until_whole(before))
    assert back_s < SOON_S
    one.assert_same_bits(truth())


@long
def test_7_all_workers_but_one_are_killed_at_once(start: Start, truth: Callable[..., Truth]) -> None:
    one = start()
    one.wait_for_step(12)
    before, step = one.newest, one.step
    one.kill(*one.newest.members[:-1])
    back_s = one.wait_until_back(before)
    tell(back=back_s, whole=back_s + one.wait_until_whole(before))
    after = one.log.read(before.number + 1)
    # One step less when the leader wrote its line of metrics and died before the vote reached the survivor, which retries the step.
    assert after.step >= step - 1 and len(after.members) == 1 and back_s < SOON_S
    one.assert_same_bits(truth())


def test_8_all_workers_are_killed_at_once(start: Start, truth: Callable[..., Truth]) -> None:
    one = start()
    one.wait_for_step(14)
    before = one.newest
    one.kill(*before.members)
    back_s = one.wait_until_whole(before)
    again = one.step
    tell(back=back_s)
    assert again >= 10 and back_s < SOON_S
    one.assert_same_bits(truth())
    (first, then), saved = one.events("began"), {event["step"] for event in one.events("saved")}
    assert (first["generation"], first["step"]) == (1, 0) and then["generation"] > 1 and then["step"] in saved


@pytest.mark.parametrize(
    "slot",
    [
        pytest.param(1, id="9-the new worker"),
        pytest.param(0, id="10-the leader, a source", marks=long),
        pytest.param(2, id="10-the other source", marks=long),
    ],
)
def test_killed_while_the_state_is_handed_over(start: Start, truth: Callable[..., Truth], slot: int) -> None:
    one = start()
    one.wait_for_step(12)
    before = one.newest
    one.request_fault(slot, "kill", at="hand-over")
    one.kill(one.member(1))
    struck_s = one.wait(lambda: one.fault_taken(slot), what="the hand-over")
    step = one.step
    back_s = one.wait_for_step(step + 1)
    tell(handed_over_after=struck_s, back=back_s, whole=back_s + one.wait_until_whole(before))
    assert back_s < SOON_S and one.newest.step >= 12
    one.assert_same_bits(truth())


# An agent or a forkserver dies.


def test_12_the_agent_is_killed_and_the_next_one_adopts_its_workers(start: Start, truth: Callable[..., Truth]) -> None:
    one = start(steps=60, words=("--min", "3"))  # the run may be over before the new agent's forkserver has imported everything
    one.wait_for_step(8)
    before, step = one.newest, one.step
    one.kill_agent()
    one.agents.clear()
    until(lambda: one.step >= step + 5)
    one.start_agent()
    adopted_s = one.wait(lambda: len(one.events("worker taken over")) == 3, what="the adoption")
    assert one.newest == before and adopted_s < SOON_S
    one.kill(one.member(1))
    tell(adopted=adopted_s, whole=one.wait_until_whole(before))
    one.assert_same_bits(truth(60))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param({"steps": 60}, "--steps is 120 for them and 60 here", id="12-steps", marks=long),
        pytest.param({"words": ("--max", "2")}, "--max is 3 for them and 2 here", id="12-max", marks=long),
    ],
)
def test_the_agent_is_killed_and_the_next_one_is_given_another_command(
    start: Start, truth: Callable[..., Truth], changed: dict[str, Any], says: str
) -> None:
    one = start(steps=120, words=("--max", "3"))
    one.wait_for_step(8)
    before = one.newest
    one.kill_agent()
    one.agents.clear()
    refused = another_command(one, HERE, **changed)
    assert refused.wait(60) == 2 and one.says(says) and len(one.processes()) == 3 and one.newest == before
    one.start_agent()
    one.wait(lambda: len(one.events("worker taken over")) == 3, what="the adoption")
    one.assert_same_bits(truth(120))


@pytest.mark.parametrize("host", [pytest.param(0, id="13-of the host that leads"), pytest.param(None, id="14-all")])
@long
def test_agents_of_several_hosts_are_killed(start: Start, truth: Callable[..., Truth], network: Network, host: int | None) -> None:
    hosts = network.hosts if host is None else [network.hosts[host]]
    one = start(network.hosts, workers=1, steps=60)
    one.wait_for_step(8)
    before, step = one.newest, one.step
    for dead in hosts:
        one.kill_agent(dead)
    until(lambda: one.step >= step + 5)
    for dead in hosts:
        one.start_agent(dead)
    one.wait(lambda: len(one.events("worker taken over")) == len(hosts), what="the adoption")
    assert one.newest == before
    one.assert_same_bits(truth(60))


@long
def test_18_the_forkserver_is_killed_and_a_worker_at_once(start: Start, truth: Callable[..., Truth]) -> None:
    one = start(steps=100)
    one.wait_for_step(8)
    before = one.newest
    os.kill(one.forkserver(), signal.SIGKILL)
    one.kill(one.member(1))
    whole_s = one.wait_until_whole(before)
    tell(whole=whole_s)
    assert whole_s < SOON_S
    one.assert_same_bits(truth(100))


@long
def test_20_an_agent_is_stopped_and_goes_on(start: Start, truth: Callable[..., Truth]) -> None:
    one = start(steps=120)
    one.wait_for_step(8)
    before, step = one.newest, one.step
    one.kill_agent(number=signal.SIGSTOP)
    one.kill(one.member(1))
    until(lambda: one.step >= step + 40)
    assert len(one.newest.members) == 2
    one.kill_agent(number=signal.SIGCONT)
    tell(whole=one.wait_until_whole(before))
    one.assert_same_bits(truth(120))


# A worker is there, and does not do what it should.


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("stop", id="19-stopped"),
        pytest.param("spin", id="21-spins with the interpreter's lock", marks=long),
        pytest.param("hang", id="21-hangs", marks=long),
        pytest.param("raise", id="22-raises", marks=long),
        pytest.param("exit", id="23-exits with 0", marks=long),
        pytest.param("flip", id="37-a bit of its weights flips", marks=long),
    ],
)
def test_a_worker_that_fails_is_left_out_and_replaced(start: Start, truth: Callable[..., Truth], what: Any) -> None:
    one = start(steps=60, values={"elastic__hang_timeout_s": 4.0})
    one.wait_for_step(8)
    before, pid = one.newest, one.member(1).pid
    one.inject_fault(1, what, at="backward", step=12)
    back_s = one.wait_for_step(13)
    tell(back=back_s, whole=back_s + one.wait_until_whole(before))
    after = one.log.read(before.number + 1)
    assert pid not in {member.pid for member in one.newest.members} and after.step >= 11 and back_s < SOON_S
    assert "/1" in after.reason
    one.assert_same_bits(truth(60))


@pytest.mark.parametrize("step", [pytest.param(20, id="37-on the way", marks=long), pytest.param(30, id="37-in the end")])
def test_a_bit_that_flips_on_the_leader_before_it_saves_is_in_no_checkpoint(
    start: Start, truth: Callable[..., Truth], tmp_path: Path, step: int
) -> None:
    one = start(steps=30)
    one.wait_for_step(4)
    one.inject_fault(one.leader.slot, "flip", at="saving", step=step)
    one.assert_same_bits(truth(30))
    assert one.says(rf"the weights or optimizer state of rank 0 .* differ before step {step + 1}")
    (tmp_path / "undisturbed").mkdir()
    undisturbed(tmp_path / "undisturbed", 30)
    for saved in (20, 30):
        assert digest_line(one.run, saved) == digest_line(tmp_path / "undisturbed" / "run", saved)


@pytest.mark.parametrize("workers", [2, 3])
@long
def test_37_where_not_every_step_is_compared_all_go_back_to_one_that_was(start: Start, truth: Callable[..., Truth], workers: int) -> None:
    one = start(steps=60, workers=workers, values={"elastic__verify_every": 10, "checkpoint__every_steps": 5})
    one.wait_for_step(8)
    one.inject_fault(1, "flip", at="forward", step=32)
    one.assert_same_bits(truth(60))
    assert one.says("differ before step 3[5-9]")


@pytest.mark.parametrize("what", ["told too late", "three workers", "four workers", "a buffer"])
@long
def test_37_a_bit_that_flips_at_a_bad_moment_is_in_nobody_in_the_end(start: Start, tmp_path: Path, what: str) -> None:
    """In a loop of its own: in the leader of two, when the other is gone before the leader has read that they differ; and in a worker that
    is just about to give its state to the one that takes another's place: then two or three have that state, and only three can tell."""
    (tmp_path / "own.py").write_text(Path(OWN_LOOP.rpartition(":")[0]).read_text() + (LATE if what == "told too late" else GIVEN))
    (tmp_path / "which").write_text("seen" if what == "a buffer" else "optim.")
    one = start(steps=100, workers={"told too late": 2, "four workers": 4}.get(what, 3), script="own.py:train")
    one.wait_for_step(8)
    if what == "told too late":
        one.inject_fault(one.leader.slot, "flip", at="forward", step=70)
    else:
        one.inject_fault(0, "kill", at="forward", step=55)
    assert one.end() == {"here": 0}, one.report()
    if what == "four workers":
        assert one.says("here/2: its weights or optimizer state differ before step [5-9]")
    else:
        assert one.says("none is in the majority") and one.says(r"the weights.* of here/[02]/\w+ were wrong")
    assert one.says("resumes from step 50") == (what != "four workers")
    command = [sys.executable, "-m", "lockstep", "train", "own.py:train", "--workers", "1", "--out", "alone", "--steps", "100"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert digest_line(one.run, 100) == digest_line(tmp_path / "alone", 100)


LATE = """
import time
import lockstep.training.replica_group
from lockstep.errors import PeersLostError

agree = lockstep.training.replica_group.vote_on_step


def late(world, vote, **named):
    verdict = agree(world, vote, **named)
    while verdict.divergent_ranks and world.leader:
        if world.generation_error():
            raise PeersLostError("the leader read no answers", "", "")
        time.sleep(0.01)
    return verdict


lockstep.training.replica_group.vote_on_step = late
"""


GIVEN = """
from pathlib import Path
import lockstep.training.replica_group
from lockstep.training.state_transfer import transfer_roles

give, bare_model, which = lockstep.training.replica_group.transfer_state, make_model, Path("which")


def make_model():
    model = bare_model()
    for number in range(3):
        model.register_buffer(f"seen-{number}", torch.zeros(2))
    return model


def flipped(world, capture, *rest):
    if transfer_roles(world.standings)[2] and world.membership.worker_env.slot == 2 and which.exists():
        for name, tensor in capture().items():
            if which.read_text() in name:
                tensor.view(torch.int32).view(-1)[0] ^= 1
        which.unlink()
    return give(world, capture, *rest)


lockstep.training.replica_group.transfer_state = flipped
"""


@long
def test_22_an_error_that_comes_again_and_again_ends_the_run_with_its_traceback(start: Start) -> None:
    one = start()
    one.wait_for_step(8)

    def poisoned() -> bool:
        for slot in range(3):
            if one.fault_taken(slot):
                one.request_fault(slot, "raise", at="backward", step=12)
        return all(agent.poll() is not None for agent in one.agents.values())

    tell(ended_after=one.wait(poisoned, what="the end"))
    for slot in range(3):
        one.withdraw_fault(slot)
    assert set(one.end().values()) == {1} and one.step <= 12
    assert one.says("ValueError: injected error") and one.says("in a row to fail at step 1[12] with an error of its own")
    one.assert_nothing_left()


@long
def test_52_the_kernel_ends_a_worker_that_wants_too_much_memory(start: Start, truth: Callable[..., Truth]) -> None:
    one = start(steps=60)
    one.wait_for_step(8)
    before, step = one.newest, one.step
    with little_memory(one.member(1).pid):
        back_s = one.wait(lambda: one.newest.number > before.number and one.step > step, what="the next generation")
        tell(back=back_s, whole=back_s + one.wait_until_whole(before))
    assert one.newest.step >= step
    one.assert_same_bits(truth(60))


@long
def test_an_own_loop_heals_in_place_of_one_fault_after_the_other(start: Start, tmp_path: Path) -> None:
    one = start(steps=1_000_000, script=OWN_LOOP)
    one.wait_for_step(50)
    for what in ("worker", "leader", "flip", "agent", "stop"):
        before, step = one.newest, one.step
        if what == "agent":
            one.kill_agent()
            one.start_agent()
            one.wait_for_step(step + 50)
            continue
        if what in ("flip", "stop"):
            one.inject_fault(1, what, at="forward", step=step + 20)
        else:
            one.kill(one.leader if what == "leader" else one.member(1) if one.member(1) != one.leader else one.member(2))
        tell(**{what: one.wait_until_whole(before)})
    one.stop()
    assert set(one.end().values()) == {75}, one.report()
    assert not [record.reason for record in one.generations if "no member of generation" in record.reason]
    command = [sys.executable, "-m", "lockstep", "train", OWN_LOOP, "--workers", "1", "--out", "alone", "--steps", str(one.step)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    saved = one.step // 50 * 50
    assert digest_line(one.run, saved) == digest_line(tmp_path / "alone", saved)


# It is told to stop.


@pytest.mark.parametrize("who", [pytest.param("worker", id="24-a worker"), pytest.param("agent", id="24-the agent")])
@long
def test_a_polite_stop_saves_and_the_same_command_goes_on(start: Start, truth: Callable[..., Truth], who: str) -> None:
    one = start()
    one.wait_for_step(12)
    if who == "agent":
        one.kill_agent(number=signal.SIGTERM)
    else:
        one.kill(one.member(1), number=signal.SIGTERM)
    assert set(one.end().values()) == {75}
    step = one.step
    assert 12 <= step < STEPS
    one.assert_nothing_left()
    one.start_agent()
    one.assert_same_bits(truth())
    assert one.says(rf"(goes on|continues|starts|resumed) .*step {step}")


# The run folder.


@long
@pytest.mark.parametrize("part", [pytest.param("run/generations", id="32-the log"), pytest.param("run", id="32-the whole run folder")])
def test_the_shared_disk_is_away_for_a_while(start: Start, truth: Callable[..., Truth], tmp_path: Path, part: str) -> None:
    one = start(steps=200)
    one.wait_for_step(12)
    before, shown = one.newest, one.shown
    with away(tmp_path / part):
        time.sleep(10)
        assert one.shown >= shown + 20
    assert one.newest == before
    one.assert_same_bits(truth(200))


@pytest.mark.parametrize(
    "dies", [pytest.param((), id="60-nobody dies"), pytest.param((1,), id="60-a worker dies"), pytest.param((0,), id="60-the leader dies")]
)
@long
def test_the_shared_disk_does_not_answer_for_a_while(
    start: Start, truth: Callable[..., Truth], tmp_path: Path, disk: Path, dies: Sequence[int]
) -> None:
    one = start(steps=300, values={"elastic__hang_timeout_s": 3.0})
    one.wait_for_step(12)
    before, shown = one.newest, one.shown
    with frozen(disk):
        until(lambda: one.shown >= shown + 60)  # six checkpoints are due on the way
        one.kill(*(one.member(slot) for slot in dies))
        time.sleep(4)
    if dies:
        one.wait_until_whole(before)
    else:
        assert one.newest == before
    one.assert_same_bits(truth(300))
    assert one.says(r"the save of step \d+ is skipped: the previous one is still being written")
    assert not one.events("hang") and not one.says("cannot be written")


@pytest.mark.parametrize(
    ("writable", "slot"),
    [
        pytest.param(False, 1, id="55-read-only", marks=long),
        pytest.param(False, 0, id="55-read-only, the leader", marks=long),
        pytest.param(True, 1, id="56-empty and writable"),
    ],
)
def test_a_worker_is_killed_while_the_shared_disk_is_away(
    start: Start, truth: Callable[..., Truth], tmp_path: Path, writable: bool, slot: int
) -> None:
    one = start(steps=120)
    one.wait_for_step(12)
    before, shown = one.newest, one.shown
    stay = {member.id for member in before.members if member.slot != slot}
    with away(tmp_path / "run", writable=writable):
        until(lambda: one.shown >= shown + 25)  # a checkpoint is due on the way
        one.kill(next(member for member in before.members if member.slot == slot))
        time.sleep(10)  # three workers in a row would have ended by now
        assert all(agent.poll() is None for agent in one.agents.values())
        made = {path.name for path in (tmp_path / "run").iterdir()} & {"token", "generations", "waiting", "checkpoints", "logs"}
        assert not made
    whole_s = one.wait_until_whole(before)
    tell(whole=whole_s)
    assert [record.number for record in one.generations] == list(range(1, one.newest.number + 1))
    assert stay < {member.id for member in one.newest.members} and one.log.read(before.number).token == before.token
    one.assert_same_bits(truth(120))
    assert one.says(r"the run folder cannot be used \(.*\); worker here/\d waits for it") and one.says("the run folder is usable again")
    assert one.says(r"the checkpoint of step \d+ was not saved: (Read-only|No such file)") and not one.says("in a row to fail")


@long
def test_57_the_agent_starts_anew_while_the_shared_disk_is_away(start: Start, truth: Callable[..., Truth], tmp_path: Path) -> None:
    one = start(steps=120)
    one.wait_for_step(12)
    before = one.newest
    one.kill_agent()
    with away(tmp_path / "run", writable=True):
        one.start_agent()
        assert one.end() == {"here": 2} and one.says("run is not the folder that the workers of here train in: it has no token")
        assert not list((tmp_path / "run").iterdir())
    one.start_agent()
    one.assert_same_bits(truth(120))
    assert one.newest.members == before.members or one.newest.end


@pytest.mark.parametrize("on_error", [pytest.param("continue", id="59-wait for it"), pytest.param("stop", id="59-end")])
@long
def test_the_run_comes_to_its_end_while_the_shared_disk_is_away(
    start: Start, truth: Callable[..., Truth], tmp_path: Path, on_error: str
) -> None:
    one = start(values={"checkpoint__on_error": on_error})
    one.wait_for_step(22)
    with away(tmp_path / "run", writable=True):
        if on_error == "stop":
            assert one.end() == {"here": 3} and one.says(r"SaveFailedError: the checkpoint of step \d+ was not saved")
            assert not (tmp_path / "run" / "generations").exists()
            return
        one.wait(lambda: one.says("worker here/0 waits for it"), what="the end of all workers")
        assert not (tmp_path / "run" / "generations").exists()
    one.assert_same_bits(truth())


@long
def test_58_an_os_error_of_its_own_loop_is_its_own(start: Start, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def train(steps: int = 0) -> None:\n    open('no such folder/file')\n")
    one = start(script="own.py:train")
    assert one.end() == {"here": 1}
    assert one.says("FileNotFoundError: .*no such folder/file") and one.says("number 3 in a row to fail before its first step")
    one.assert_nothing_left()


@long
def test_33_two_starts_of_one_run_are_refused(start: Start, truth: Callable[..., Truth], tmp_path: Path) -> None:
    one = start(steps=60)
    one.wait_for_step(5)
    first = one.agents.pop("here")
    one.start_agent()
    assert one.end() == {"here": 2} and one.says("another training is already running in run")
    one.agents["here"] = first
    one.assert_same_bits(truth(60))


@long
def test_34_what_a_dead_run_has_left_is_ignored(start: Start, truth: Callable[..., Truth]) -> None:
    one = start()
    one.wait_for_step(14)
    before = one.newest
    one.kill_host(HERE)
    one.start_agent()
    back_s = one.wait_until_whole(before)
    tell(back=back_s)
    assert one.step >= 10 and back_s < SOON_S
    one.assert_same_bits(truth())


@long
def test_53_the_metrics_cannot_be_written_for_a_while(start: Start, truth: Callable[..., Truth], tmp_path: Path) -> None:
    one = start(steps=60, values={"track__tensorboard": True})
    one.wait_for_step(8)
    shown = one.shown
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "run" / "elsewhere.jsonl")
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    until(lambda: one.shown >= shown + 20)
    (tmp_path / "run" / "metrics.jsonl").rmdir()
    (tmp_path / "run" / "elsewhere.jsonl").rename(tmp_path / "run" / "metrics.jsonl")
    one.assert_same_bits(truth(60))


@long
def test_41_the_committer_is_killed_while_it_saves(start: Start, truth: Callable[..., Truth]) -> None:
    one = start()
    one.wait_for_step(8)
    before = one.newest
    one.inject_fault(one.leader.slot, "kill", at="saving", step=10)
    back_s = one.wait_for_step(13)
    tell(back=back_s, whole=back_s + one.wait_until_whole(before))
    assert back_s < SOON_S
    one.assert_same_bits(truth())


# Several hosts.


@pytest.mark.parametrize(
    ("number", "away_s"),
    [
        pytest.param(1, 0, id="15-a host"),
        pytest.param(0, 3, id="16-the host that leads, back after 3 s", marks=long),
        pytest.param(1, 25, id="17-back after 25 s", marks=long),
    ],
)
def test_a_host_loses_its_power(start: Start, truth: Callable[..., Truth], network: Network, number: int, away_s: float) -> None:
    steps = 600 if away_s > 10 else 120
    one = start(network.hosts, workers=1, steps=steps)
    one.wait_for_step(8)
    lost, before, step = network.hosts[number], one.newest, one.step
    survivors = {member.pid for member in before.members if member.host != lost.name}
    network.disconnect(lost)  # first, so that its kernel says goodbye to nobody
    one.kill_host(lost)
    back_s = one.wait_until_back(before)
    assert one.newest.step >= step and back_s < SOON_S
    network.reconnect(lost)
    time.sleep(away_s)
    alone = one.newest
    one.start_agent(lost)
    tell(back=back_s, joined=one.wait_until_whole(alone))
    assert survivors < {member.pid for member in one.newest.members}
    one.assert_same_bits(truth(steps))


@pytest.mark.parametrize("seconds", [pytest.param(1.0, id="25-1 s"), pytest.param(5.0, id="25-5 s", marks=long)])
@long
def test_a_cable_is_out_for_a_moment(start: Start, truth: Callable[..., Truth], network: Network, seconds: float) -> None:
    one = start(network.hosts, workers=1, steps=120)
    one.wait_for_step(8)
    before = one.newest
    network.disconnect(network.hosts[1])
    time.sleep(seconds)
    network.reconnect(network.hosts[1])
    if seconds > 2:
        tell(whole=one.wait_until_whole(before))
    else:
        tell(back=one.wait_for_step(one.step + 2))
        assert one.newest == before
    one.assert_same_bits(truth(120))


@pytest.mark.parametrize("who", [pytest.param(0, id="26-the leader"), pytest.param(1, id="26-another", marks=long)])
def test_a_host_is_cut_off_for_good(start: Start, truth: Callable[..., Truth], network: Network, who: int) -> None:
    one = start(network.hosts, workers=1, steps=60)
    one.wait_for_step(8)
    before, step, lost = one.newest, one.step, network.hosts[who]
    network.disconnect(lost)
    back_s = one.wait_until_back(before)
    tell(back=back_s)
    after = one.log.read(before.number + 1)
    assert after.step >= step and back_s < SOON_S
    side = {member.host for member in after.members}
    assert side == {host.name for host in network.hosts} - {lost.name}, "the larger side, and nobody of the other"
    one.assert_same_bits(truth(60))


@long
def test_26_two_hosts_are_cut_apart_and_exactly_one_goes_on(start: Start, truth: Callable[..., Truth], network: Network) -> None:
    hosts = network.hosts[:2]
    one = start(hosts, workers=1, steps=700)
    one.wait_for_step(8)
    before = one.newest
    network.disconnect(hosts[1])
    back_s = one.wait_until_back(before)
    tell(back=back_s)
    assert back_s < SOON_S
    one.assert_same_bits(truth(700))
    apart = [record for record in one.generations[before.number :] if not record.end]
    assert [len(record.members) for record in apart] == [1], "one generation, of one"


@long
def test_27_what_one_host_sends_to_the_leader_is_lost(start: Start, truth: Callable[..., Truth], network: Network) -> None:
    one = start(network.hosts, workers=1, steps=120)
    one.wait_for_step(8)
    before, step, (a, b, _) = one.newest, one.step, network.hosts
    network.drop_packets(b, a)
    back_s = one.wait_until_back(before)
    tell(back=back_s)
    assert back_s < SOON_S and one.newest.step >= step
    network.restore_packets(b, a)
    one.assert_same_bits(truth(120))


@long
def test_28_two_workers_do_not_reach_each_other_and_a_third_reaches_both(
    start: Start, truth: Callable[..., Truth], network: Network
) -> None:
    one = start(network.hosts, workers=1, steps=60, values={"elastic__hang_timeout_s": 4.0})
    one.wait_for_step(8)
    before, step, (_, b, c) = one.newest, one.step, network.hosts
    network.drop_packets(b, c)
    network.drop_packets(c, b)
    back_s = one.wait_until_back(before, 2)
    tell(back=back_s)
    assert one.newest.step >= step and back_s < SOON_S
    one.assert_same_bits(truth(60))


@long
def test_29_a_cut_off_host_comes_back_after_the_others_went_on(start: Start, truth: Callable[..., Truth], network: Network) -> None:
    one = start(network.hosts, workers=1, steps=200)
    one.wait_for_step(8)
    before = one.newest
    network.disconnect(network.hosts[0])
    back_s = one.wait_until_back(before)
    time.sleep(3.0)
    between = one.newest
    network.reconnect(network.hosts[0])
    tell(back=back_s, whole=one.wait_until_whole(between))
    assert before.members[0].id not in {member.id for member in one.newest.members}
    one.assert_same_bits(truth(200))


@long
def test_30_a_slow_network_is_no_death(start: Start, truth: Callable[..., Truth], network: Network) -> None:
    one = start(network.hosts, workers=1, steps=15)
    one.wait_for_step(3)
    before = one.newest
    for host in network.hosts:
        network.limit_rate(host, "1mbit")
    tell(step=one.wait_for_step(8, timeout_s=200) / 5)
    assert one.newest == before
    one.assert_same_bits(truth(15), timeout_s=200)


@long
@pytest.mark.parametrize("slot", [pytest.param(1, id="30-a worker"), pytest.param(0, id="30-the leader")])
def test_a_worker_is_killed_while_a_bucket_crawls_over_a_slow_network(
    start: Start, truth: Callable[..., Truth], network: Network, slot: int
) -> None:
    one = start(network.hosts, workers=1, steps=15)
    one.wait_for_step(3)
    before, victim = one.newest, one.newest.members[slot]
    for host in network.hosts:
        network.limit_rate(host, "1mbit")
    one.wait_for_step(5, timeout_s=200)
    time.sleep(1)  # a step takes some
    one.kill(victim)
    back_s = one.wait_until_back(before)
    tell(back=back_s)
    assert back_s < 2 * SOON_S
    for host in network.hosts:
        network.limit_rate(host, "1gbit")
    one.assert_same_bits(truth(15), timeout_s=200)


@long
@pytest.mark.parametrize("shift_s", [pytest.param(3600, id="31-ahead"), pytest.param(-3600, id="31-behind")])
def test_the_clock_of_a_host_is_an_hour_off(start: Start, truth: Callable[..., Truth], tmp_path: Path, shift_s: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import time\nright = time.time\ntime.time = lambda: right() + {shift_s}\n")
    hosts = [Host("a"), Host("b", enter=("env", f"PYTHONPATH={tmp_path}:{os.environ.get('PYTHONPATH', '')}"))]
    one = start(hosts, workers=1)
    one.wait_for_step(12)
    before = one.newest
    one.kill(before.members[0])
    tell(whole=one.wait_until_whole(before))
    assert one.log.read(before.number + 1).step >= 12
    one.assert_same_bits(truth())


@long
def test_35_one_worker_then_four_then_one(start: Start, truth: Callable[..., Truth]) -> None:
    hosts, began_s = [Host(name) for name in "abcd"], time.monotonic()
    one = start(hosts, workers=1, steps=400, start=hosts[:1], values={"elastic__rendezvous_timeout_s": 0.1})
    one.wait_for_step(5)
    for size, host in enumerate(hosts[1:], 2):
        before = one.newest
        one.start_agent(host)
        one.wait_until_back(before, size)
    for size, host in zip((3, 2, 1), hosts, strict=False):
        before = one.newest
        one.kill_agent(host, signal.SIGUSR1)
        one.wait_until_back(before, size)
    sizes = [len(record.members) for record in one.generations]
    assert sizes == [1, 2, 3, 4, 3, 2, 1] and [record.step for record in one.generations] == sorted(
        one.log.read(n).step for n in range(1, 8)
    )
    one.assert_same_bits(truth(400))
    took_s, told = time.monotonic() - began_s, one.events("goodput")[-1]
    assert 0.5 * took_s < told["wall_s"] < took_s, "the last one to join tells of the whole run"
    assert sum(seconds for name, seconds in told.items() if name.endswith("_s") and name != "wall_s") == pytest.approx(told["wall_s"])


def test_every_second_of_a_run_is_counted_also_of_what_was_lost_with_all_workers(start: Start, truth: Callable[..., Truth]) -> None:
    one = start(steps=60, values={"checkpoint__every_steps": 20})
    for step in (10, 30):  # before the first checkpoint, and behind it
        one.wait_for_step(step)
        before = one.newest
        one.kill(*before.members)
        one.wait(lambda before=before: one.newest.number > before.number, what="the next generation")  # type: ignore[misc]
    one.assert_same_bits(truth(60))
    first, told = one.events("worker started")[0], one.events("goodput")[-1]
    took_s = (datetime.fromisoformat(told["time"]) - datetime.fromisoformat(first["time"])).total_seconds()
    assert told["wall_s"] == pytest.approx(took_s, rel=0.01)
    assert told["lost_s"] > 0 and told["starting_s"] > 0
    assert sum(seconds for name, seconds in told.items() if name.endswith("_s") and name != "wall_s") == pytest.approx(told["wall_s"])


@long
def test_36_a_host_whose_numbers_would_have_other_bits_is_refused(start: Start, truth: Callable[..., Truth]) -> None:
    hosts = [Host("a"), Host("b", enter=("env", "ATEN_CPU_CAPABILITY=default"))]
    one = start(hosts, workers=1, steps=120, start=hosts[:1], values={"elastic__rendezvous_timeout_s": 0.1})
    one.wait_for_step(5)
    before = one.newest
    one.start_agent(hosts[1])
    refused = one.agents.pop("b")
    one.wait(lambda: refused.poll() is not None, what="the refusal")
    assert refused.returncode == 2 and one.says("would compute different bits") and one.newest == before
    one.assert_same_bits(truth(120))


def another_command(one: Training, host: Host, **changed: Any) -> subprocess.Popen[bytes]:
    """An agent of this host that is started with another command: `steps=60`, `words=("--max", "2")`."""
    before = {name: getattr(one, name) for name in changed}
    for name, value in changed.items():
        setattr(one, name, value)
    one.start_agent(host)
    for name, value in before.items():
        setattr(one, name, value)
    return one.agents.pop(host.name)


@long
def test_36_a_host_that_was_started_with_another_run_is_refused(start: Start, truth: Callable[..., Truth]) -> None:
    hosts = [Host("a"), Host("b")]
    one = start(hosts, workers=1, steps=120, start=hosts[:1], values={"elastic__rendezvous_timeout_s": 0.1})
    one.wait_for_step(5)
    before = one.newest
    refused = another_command(one, hosts[1], steps=60)
    one.wait(lambda: refused.poll() is not None, what="the refusal")
    assert refused.returncode == 2 and one.says("run steps is '60' there and '120' here") and one.newest == before
    one.assert_same_bits(truth(120))


def test_36_who_stood_by_from_the_start_is_looked_at_before_it_is_let_in(start: Start, truth: Callable[..., Truth]) -> None:
    hosts = [Host("a"), Host("b"), Host("c", enter=("env", "ATEN_CPU_CAPABILITY=default"))]
    one = start(hosts, workers=1, steps=120, words=("--max", "2"))
    one.wait_for_step(5)
    assert [member.host for member in one.newest.members] == ["a", "b"]
    before, refused = one.newest, one.agents["c"]
    one.wait(lambda: refused.poll() is not None, what="the refusal")
    one.agents.pop("c")
    assert refused.returncode == 2 and one.says("would compute different bits") and one.newest == before
    one.assert_same_bits(truth(120))


@long
def test_36_a_loop_of_ones_own_that_was_started_with_other_flags_is_refused(start: Start) -> None:
    hosts, script = [Host("a"), Host("b")], f"{Path(__file__).parents[1] / 'support' / 'hanging_loop.py'}:train"
    one = start(hosts, workers=1, steps=5000, script=script)
    one.wait_for_step(20)
    before = one.newest
    one.kill_host(hosts[1])
    one.wait_until_back(before, 1)
    refused = another_command(one, hosts[1], steps=60)
    one.wait(lambda: refused.poll() is not None, what="the refusal")
    assert refused.returncode == 2 and one.says("--steps is '60' there and '5000' here")
    one.agents.pop("b", None)
    one.stop()
    assert set(one.end().values()) == {75}
    one.assert_nothing_left()


@long
def test_35_who_stood_by_from_the_start_has_its_model_when_it_is_let_in(start: Start, truth: Callable[..., Truth]) -> None:
    hosts = [Host(name) for name in "abc"]
    one = start(hosts, workers=1, steps=120, words=("--max", "2"))
    one.wait(lambda: len(list((one.run / "waiting").glob("c-*.json"))) == 1 and one.step >= 10, what="the one that stands by")
    before = one.newest
    one.kill(before.members[1])
    tell(back=one.wait_until_back(before, 2))
    assert {member.host for member in one.newest.members} == {"a", "c"}
    one.assert_same_bits(truth(120))


# All of it.


@long
def test_11_kills_without_a_pause(start: Start, truth: Callable[..., Truth]) -> None:
    one = start(steps=400, values={"checkpoint__every_steps": 5})
    one.wait_for_step(8)
    chance, kills, end_s, progress = random.Random(1), 0, time.monotonic() + 60, one.step
    while time.monotonic() < end_s and one.step < 380:
        one.kill(chance.choice(list(one.processes().values()) or [one.leader]))
        kills += 1
        time.sleep(0.5)
    print(f"{kills} kills, {one.step - progress} steps meanwhile, {one.newest.number} generations")
    assert kills >= 50 and one.step > progress
    one.assert_same_bits(truth(400))


PLACES: list[dict[str, Any]] = [
    {"at": "forward"},
    {"at": "backward"},
    {"at": "collective"},
    {"at": "collective", "after": 1},  # between two buckets
    {"at": "voting"},
]


@pytest.mark.timeout(600)
def test_54_every_place_of_every_step(start: Start, truth: Callable[..., Truth]) -> None:
    """SIGKILL at each place of each step, the replicas in turn.

    With --min 3 those who are left wait until all three are there, and do the step again, in which the next one dies at the next place.
    After the vote the step is not done again: there one dies in the update, and another one while it saves.
    """
    one = start(steps=6, words=("--min", "3"), values={"checkpoint__every_steps": 1})
    began_s = time.monotonic()
    for step in range(1, 7):
        slots = [(step + turn) % 3 for turn in range(8)]
        for slot, following, place in zip(slots, slots[1:], PLACES, strict=False):
            one.inject_fault(slot, "kill", step=step, **place)
            one.wait_until_joining(following)
        one.request_fault(slots[5], "kill", at="updating", step=step)
        one.inject_fault(slots[6], "kill", at="saving", step=step)
        one.wait(lambda slot=slots[5]: one.fault_taken(slot), what=f"the update of {step}")  # type: ignore[misc]
        if step < 6:
            one.wait_until_joining(slots[7])
    tell(each=(time.monotonic() - began_s) / 42)
    one.assert_same_bits(truth(6))
    expected = [(place["at"], step) for step in range(1, 7) for place in (*PLACES, {"at": "updating"}, {"at": "saving"})]
    assert sorted(one.injected_faults()) == sorted(expected)


@contextmanager
def away(folder: Path, *, writable: bool = False) -> Iterator[None]:
    """For a while `folder` is empty, and cannot be written, unless it is the mount point itself that is `writable`."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "rw" if writable else "ro", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """For a while nothing that writes on `disk` returns, not even when it is killed."""
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


@contextmanager
def little_memory(pid: int) -> Iterator[None]:
    """A process gets no more memory: the kernel ends it."""
    group = Path("/sys/fs/cgroup/memory") / f"lockstep-{pid}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group of processes with a limit of its own: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text("1M")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def until(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `done()`, without an agent."""
    end_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.01)
