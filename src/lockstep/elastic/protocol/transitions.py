"""Membership protocol: one worker's reactions to events, without sockets, files or clocks.

The membership thread (membership.py) reports every event with the time of its monotonic clock and
carries out the returned effects. The simulation in tests/support/simulation drives the same code
through random histories of faults. Phases of a worker:

    out    not in a generation: a new worker, or one on standby
    in     in `generation`: forming its group, or training
    left   its main thread has left the group and reported its step (LeaveReport)
    gone   removed, refused, or the run ended

The *coordinator* is the first member of the generation that this worker does not count as lost:
rank 0, or the rank that would succeed it. Every member holds a link to it and receives its
heartbeats. When the group breaks, every member leaves it and reports to the coordinator. Once each
other member has reported, exited or timed out, the coordinator proposes the next generation to the
log (generation_log.py); a proposer that loses adopts the winner. If the network is cut in two, the
larger side proposes first. The smaller side waits as long again and proceeds only if the log is
still unchanged.

Lost or repeated messages are harmless: each heartbeat re-sends the sender's state (`_update_for`),
and a member heard from again counts as alive. Correctness depends on the log alone: two members
that both believe to be the coordinator both propose, and one of them wins.

If the complete replicas are fewer than `min_workers`, the members of incomplete ones are released:
they exit, and their replacements join.

A stop request lowers `min_workers`: the remaining workers form one more generation, whose vote
contains the request, and save. Without a training generation there is nothing to save: the first
waiting worker records the end of the run in the log.

A joiner asks every member. The members agree on a step (in its vote), leave the group after it,
and form the next generation with the joiner. If no member of a generation is left, new workers
gather around the first of them and resume from a checkpoint.

A worker of a new start asks without a fingerprint: it has no model yet. Members that train (they
have a fingerprint) tell such a worker to get ready, and it asks again as a joiner.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.elastic.generation_log import Generation, Member, Removed, RunResult
from lockstep.elastic.protocol import decisions
from lockstep.elastic.protocol.decisions import Joiner, LeaveReport, member_names
from lockstep.elastic.protocol.state import (
    AbortGroup,
    Effect,
    Exit,
    FormGroup,
    GetReady,
    MembershipState,
    ReadLog,
    Send,
)
from lockstep.runtime.signals import STOP_EXIT_CODES


class Protocol(MembershipState):
    """Each event method takes the time and returns the effects that cannot wait, in order.
    `advance` returns the others. It costs O(members), so call it once for all events of a turn:
    the reports of all members after a loss then cost O(members) together."""

    # -- requests of the main thread ---------------------------------------------------------------

    def request_join(
        self, now_s: float, fingerprint: Mapping[str, str], *, is_joining: bool = False
    ) -> list[Effect]:
        self.join_requested = True
        self.fingerprint = fingerprint
        self.is_joining = is_joining
        self.log.read_s = now_s
        return [ReadLog(0)]

    def set_fingerprint(self, fingerprint: Mapping[str, str], now_s: float) -> list[Effect]:
        """Start to train: check each waiting joiner against the fingerprint."""
        joiners = list(self.joiners.values())
        self.fingerprint = fingerprint
        self.joiners = {}
        return [effect for joiner in joiners for effect in self._on_join_request(joiner)]

    def on_group_left(self, report: LeaveReport, now_s: float) -> list[Effect]:
        if self.phase != "in" or report.number != self.number:
            return []
        self.phase = "left"
        self.reports[self.me.id] = replace(report, ending=self.is_ending)
        self.generation_error = self.generation_error or report.why or "left"
        return self._note_change()

    def evict(self, id: str, why: str, now_s: float) -> list[Effect]:
        if id == self.me.id:
            return self._exit_removed(why)
        self.peers.dead.setdefault(id, why)
        return self._note_change()

    def regroup(self, why: str, now_s: float) -> list[Effect]:
        """Form a generation of all members that reach each other: no rank caused the hang."""
        self.partition_suspected = True
        return [*self._end_generation(why), *self._note_change()]

    def request_stop(self, name: str, now_s: float) -> list[Effect]:
        self.stop_signal = self.stop_signal or name
        return self._note_change()

    def stop_admitting(self, now_s: float) -> list[Effect]:
        """Admit no more joiners and wait for no workers: the run is about to end."""
        self.limits = replace(self.limits, min_workers=1, max_workers=0)
        self.is_ending = True
        return []

    def abort_start(self) -> list[Effect]:
        self.phase = "gone"
        return []

    # -- network events ----------------------------------------------------------------------------

    def on_link_up(self, id: str, now_s: float) -> list[Effect]:
        self.peers.links.add(id)
        self.peers.last_heard_s[id] = now_s
        self.outbox.sent.pop(id, None)
        self.peers.connect_after_s.pop(id, None)
        return self._note_change()

    def on_link_down(self, id: str, now_s: float) -> list[Effect]:
        """Connect again: a refused connection shows that the peer exited."""
        self.peers.links.discard(id)
        self.outbox.sent.pop(id, None)
        self.joiners.pop(id, None)
        self.peers.connect_after_s.pop(id, None)
        return [
            *self.peers.connect([member for member in self._monitored() if member.id == id], now_s),
            *self._note_change(),
        ]

    def on_connect_failed(self, id: str, refused: bool, now_s: float) -> list[Effect]:
        """Retry later. A refused connection is taken as proof that the process exited."""
        self.peers.connect_after_s[id] = now_s + self.limits.log_poll_s
        if refused:
            self.peers.dead.setdefault(id, "exited")
        return self._note_change()

    def on_message(self, id: str, message: Mapping[str, Any], now_s: float) -> list[Effect]:
        self.peers.last_heard_s[id] = now_s
        kind, number = message["kind"], int(message.get("number", self.number))
        if self.phase == "gone" or kind == "heartbeat":
            return []
        self.stop_signal = self.stop_signal or str(message.get("stops", ""))
        if kind == "generation" and number <= self.number:
            return self._note_change()
        if kind == "generation" and message["follows"] == self.generation.token:
            return self._adopt(Generation.from_json(message["generation"], self.generation), now_s)
        if kind == "get_ready":
            if self.phase != "out" or not self.join_requested or self.fingerprint:
                return []
            self.join_requested = False  # until this worker has a model
            self.log.waits_since_s = None
            return [GetReady()]
        if kind == "refused":
            self.phase = "gone"
            return [Exit(str(message["why"]))]
        if number > self.number:
            return [ReadLog(self.number)]
        if number < self.number:
            return [Send(id, self.outbox.announcement)]
        if kind == "join":
            # A joiner misses few members, so it names these and not the many that it reaches.
            reaches = frozenset(message["reaches"]) | (
                self.generation.ranks.keys() - message.get("misses", self.generation.ranks)
            )
            return self._on_join_request(
                Joiner(Member.from_json(message["member"]), dict(message["fingerprint"]), reaches)
            )
        if kind not in ("left", "ended") or self.phase == "out":
            return []
        if self.me.id in message["dead"]:
            return self._exit_removed(str(message["dead"][self.me.id]))
        # A reason that this worker knew before stays.
        self.peers.dead = {**message["dead"], **self.peers.dead}
        self.partition_suspected = self.partition_suspected or bool(message["partition_suspected"])
        if kind == "left":
            self.reports[id] = LeaveReport(
                number,
                int(message["step"]),
                bool(message["leaving"]),
                str(message["why"]),
                tuple(message["lost"]),
                bool(message.get("ending")),
            )
        return [*self._end_generation(str(message["why"]) or f"{id} left"), *self._note_change()]

    # -- disk events -------------------------------------------------------------------------------

    def on_log_read(
        self,
        newest: Generation,
        waiting_members: Sequence[Member],
        now_s: float,
        alive: Iterable[str] = (),
    ) -> list[Effect]:
        """Adopt `newest`. alive: ids whose liveness file has changed since the last read."""
        self.log.is_read = True
        self.waiting_members = tuple(
            member for member in waiting_members if member.id != self.me.id
        )
        if self.phase == "out":
            self.peers.last_heard_s |= {
                id: now_s for id in alive if self.generation.rank_of(id) is not None
            }
        return self._adopt(newest, now_s)

    def on_proposed(self, winner: Generation, now_s: float) -> list[Effect]:
        self.log.pending = 0
        return self._adopt(winner, now_s)

    def on_disk_error(self, now_s: float, why: str = "") -> list[Effect]:
        """Retry later. why: for the log, if it is no disturbance of the disk."""
        self.log.pending = 0
        self.log.retry_s = now_s + self.limits.log_poll_s
        return self.outbox.log_once(why) if why else []

    # -- clock -------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Advance the clock. Call at least once per heartbeat interval; more often does no harm."""
        passed_s = now_s - self.now_s
        if self.phase == "gone" or passed_s < self.limits.heartbeat_s / 10:
            return []
        # This process was stopped so long: not the peers' silence.
        stopped_s = max(0.0, passed_s - self.limits.heartbeat_s)
        self.now_s = now_s
        monitored = [member.id for member in self._monitored()]
        self.peers.last_heard_s = {
            id: min(now_s, self.peers.last_heard_s.get(id, now_s) + stopped_s) for id in monitored
        }
        self.joiners = {
            id: joiner for id, joiner in self.joiners.items() if not self._is_silent(id)
        }
        if now_s - self.outbox.heartbeat_s >= self.limits.heartbeat_s:
            self.outbox.heartbeat_s, self.outbox.sent = now_s, {}
        is_early = now_s - self.log.read_s < self._log_pause_s and not stopped_s
        if is_early or (self.phase == "out" and not self.join_requested):
            return self._note_change()
        self.log.read_s = now_s
        return [ReadLog(self.number), *self._note_change()]

    # -- actions -----------------------------------------------------------------------------------

    def advance(self, now_s: float) -> list[Effect]:
        """Return every effect that is due after the events since the last call."""
        if self.phase == "gone" or not self._changed:
            return []
        self._changed = False
        effects: list[Effect] = []
        if self.phase == "in" and not self.generation_error:
            lost = next((member for member in self.others if self._loss_reason(member.id)), None)
            if lost:
                why = f"{member_names([lost])}: {self._loss_reason(lost.id)}"
                effects += self._end_generation(why)
        effects += self.peers.connect(self._wanted_peers(), now_s)
        effects += self._propose_start(now_s) if self.phase == "out" else self._propose(now_s)
        effects += self.outbox.send(self._updates(), self.peers.links, self.generation.ranks)
        return effects

    def _note_change(self) -> list[Effect]:
        """Let the next `advance` act on an event. There are no effects before."""
        self._changed = True
        return []

    def _end_generation(self, why: str) -> list[Effect]:
        """Abort the group. This worker's updates tell the other members."""
        if self.phase != "in" or self.generation_error:
            return []
        self.generation_error = why
        return [AbortGroup(why)]

    def _exit_removed(self, why: str) -> list[Effect]:
        """Exit: the run continues without this worker."""
        effects = self._end_generation(why)
        self.phase = "gone"
        return [*effects, Exit(f"this worker was removed from the run: {why}", fenced=True)]

    def _propose(self, now_s: float) -> list[Effect]:
        """As coordinator, propose the next generation once every member has reported or is gone."""
        if not self.is_coordinator or not self._report_ready:
            return []
        if self._may_be_minority or not self._may_propose(now_s):
            return []
        gone = {member.id: why for member in self.others if (why := self._loss_reason(member.id))}
        limits = self.limits
        if self.stop_signal:  # one replica is enough to save and stop
            limits = replace(limits, min_workers=limits.replica_size)
        view = decisions.CoordinatorView(
            self.generation, self.reports, gone, self._reachable_joiners()
        )
        generation, reason = decisions.next_generation(view, limits, self.tokens())
        if generation is None:
            if reason.startswith("waiting"):
                return []
            if not (survivors := decisions.split_members(view, limits)):
                return self.outbox.log_once(reason)
            # The hosts of leaving members are about to be taken away: only the others wait for
            # more workers.
            self.peers.dead |= {
                id: report.why or "leaving"
                for id, report in self.reports.items()
                if report.leaving and id not in gone
            }
            return [*self.outbox.log_once(reason), *self._release(survivors[1])]
        incomplete = [
            member
            for member in self.generation.members
            if Removed(member.id, decisions.INCOMPLETE) in generation.out
        ]
        if generation.members and self.me in incomplete:
            # The proposer holds the new generation's store, so another one proposes.
            return self._release(incomplete)
        return self.log.propose(generation)

    def _release(self, members: Sequence[Member]) -> list[Effect]:
        """Make members of incomplete replicas exit, through updates: replacements complete a
        replica."""
        self.peers.dead |= {member.id: decisions.INCOMPLETE for member in members}
        return self._exit_removed(decisions.INCOMPLETE) if self.me in members else []

    def _propose_start(self, now_s: float) -> list[Effect]:
        """As the first candidate, propose a generation of all waiting workers if none trains."""
        if not self.join_requested or not self.log.is_read:
            return []
        active = self._active_members()
        if self.is_joining and self.number and not active:
            self.phase = "gone"
            return [
                Exit("no member is left to join; this worker restarts with the others", fenced=True)
            ]
        if active or self._first_candidate() != self.me:
            self.log.waits_since_s = None
            return []
        may_propose = self._may_propose(now_s)
        number = self.number + 1
        if self.stop_signal:  # no generation trains, so there is nothing to save
            why = f"stopped by {self.stop_signal} while its workers waited to start"
            end = RunResult(STOP_EXIT_CODES[self.stop_signal], why)
            step = self.generation.step
            stopped = Generation(number, self.tokens(), (), "", step, why, end=end)
            return self.log.propose(stopped) if may_propose else []
        limits = self.limits
        if self.log.waits_since_s is None:
            self.log.waits_since_s = now_s
        waited_s = now_s - self.log.waits_since_s
        wanted = limits.min_workers
        if waited_s < limits.rendezvous_timeout_s:
            wanted = max(limits.expected_workers, limits.min_workers)
        joiners = [joiner.member for joiner in self.joiners.values()]
        workers = [self.me, *sorted(joiners, key=lambda member: member.sort_key)]
        if len(workers) < wanted:
            is_late = waited_s >= limits.heartbeat_timeout_s
            status = decisions.rendezvous_status(workers, limits)
            return self.outbox.log_once(status) if is_late else []
        if not may_propose:
            return []
        members = tuple(decisions.first_whole_replicas(workers, limits.max_workers, limits))
        if self.me not in members:
            return self.outbox.log_once(
                f"waiting for a whole replica of {limits.replica_size} workers on this host"
            )
        no_answer = f"no answer for {limits.takeover_s:g} s"
        removed = tuple(
            Removed(member.id, self.peers.dead.get(member.id, no_answer))
            for member in self.generation.members
        )
        reason = "start"
        if self.number and not self.generation.end:
            reason = (
                f"no member of generation {self.number} is left; "
                "resuming from the newest checkpoint"
            )
        return self.log.propose(Generation(number, self.tokens(), members, "", 0, reason, removed))

    def _on_join_request(self, joiner: Joiner) -> list[Effect]:
        id = joiner.member.id
        if self.fingerprint and self.phase in ("in", "left") and not joiner.fingerprint:
            return [Send(id, {"kind": "get_ready"})]
        if (
            self.fingerprint
            and joiner.fingerprint
            and (why := decisions.refusal_reason(joiner.fingerprint, self.fingerprint))
        ):
            where = f"(there: {member_names([joiner.member])}, here: {member_names([self.me])})"
            return [Send(id, {"kind": "refused", "why": f"{why} {where}"})]
        self.joiners[id] = joiner
        return self._note_change()

    def _adopt(self, generation: Generation, now_s: float) -> list[Effect]:
        if generation.number <= self.number:
            return self._note_change()
        was_in = self.phase in ("in", "left")
        effects = self._end_generation("a newer generation exists")
        self.outbox.announcement = {
            "kind": "generation",
            "number": generation.number,
            "follows": self.generation.token,
            "generation": generation.to_json(self.generation),
        }
        self.generation = generation
        self.generation_error = ""
        self.partition_suspected = False
        self.reports = {}
        self.log.waits_since_s = None
        self.outbox.status = ""
        self.joiners = {
            id: joiner for id, joiner in self.joiners.items() if generation.rank_of(id) is None
        }
        known = {*generation.ranks, *self.joiners, *(member.id for member in self.waiting_members)}
        # Members get the whole heartbeat timeout again; the silence of joiners continues to count.
        self.peers.forget(known, monitored=self.joiners)
        # Every member passes it on: the proposer may be lost before all know.
        effects += [Send(id, self.outbox.announcement) for id in sorted(self.peers.links)]
        # A run that ended before this start is no reason to exit: this start resumes it.
        if generation.end and (was_in or generation.number > self.after):
            self.phase = "gone"
            return [*effects, Exit("the run ended", end=generation.end)]
        if generation.rank_of(self.me.id) is not None:
            self.phase = "in"
            effects.append(FormGroup(generation))
        elif was_in:
            why = next(
                (removed.why for removed in generation.out if removed.id == self.me.id),
                "it was not there",
            )
            return [*effects, *self._exit_removed(why)]
        return [*effects, *self._note_change()]
