"""Measure how long the replicas compute their micro-batches; name slow ones, and give them
fewer."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from statistics import median_low

from lockstep.elastic.consensus import StepDecision
from lockstep.elastic.runtime import ElasticRuntime, record_event
from lockstep.network.shares import ShareRule, find_slow, format_shares
from lockstep.network.subtrees import equal_shares
from lockstep.parallel.replica import Replica
from lockstep.units import join_names

log = logging.getLogger("lockstep")

NAME_EVERY_S = 300.0  # seconds between two events about one slow worker
SLOW_FOR_S = 60.0  # until the screen names it
WINDOW_STEPS = 5  # of the median; a worker that slows down is noticed after three steps
# More replicas decide less often: a decision takes about 0.2 ms for each.
REPLICAS_PER_DECISION = 16


class ShareBalance:
    """The numbers of micro-batches of the replicas. Every rank decides from the same committed
    votes.

    A generation starts with equal shares, so that a failure cannot leave ranks with different ones.
    unit     micro-batches that a replica computes at the same time
    enabled  False: shares stay equal, and slow replicas are only named
    """

    def __init__(
        self,
        runtime: ElasticRuntime,
        replica: Replica,
        unit: int,
        *,
        enabled: bool,
    ) -> None:
        self.runtime = runtime
        self.replica = replica
        self.unit = unit
        self.enabled = enabled
        self._rule = ShareRule(unit)
        self._measured: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)
        self._generation, self._shares = -1, tuple[int, ...]()
        # When each slow worker became slow, by the monotonic clock.
        self._slow: dict[str, float] = {}
        self._shown = set[str]()  # those of them that the screen has named
        self._recorded_s = dict[str, float]()  # when the last event about each was

    @property
    def shares(self) -> tuple[int, ...]:
        """The numbers of micro-batches of the next step, by replica; (): equal ones."""
        if self.runtime.world.generation != self._generation:
            self._generation, self._shares = self.runtime.world.generation, ()
            self._measured.clear()
            self._rule = ShareRule(self.unit)
        return self._shares

    def measured_us(self) -> dict[str, int]:
        """Return this worker's part of the vote, {} before three measured steps: medians of the
        newest steps in microseconds."""
        if measured := self.replica.measured_s():
            self._measured.append(measured)
        if 2 * len(self._measured) <= WINDOW_STEPS:
            return {}
        compute_us, exchange_us = (
            1 + int(1e6 * median_low(times)) for times in zip(*self._measured, strict=True)
        )
        return {"micro_batch_us": compute_us, "exchange_us": exchange_us}

    def decide(self, decision: StepDecision, step: int) -> None:
        """Set the shares after `step` has been committed."""
        times = decision.micro_batch_us
        if len(times) < 2 or step % -(-len(times) // REPLICAS_PER_DECISION):
            return
        self._name_slow(times)
        if not self.enabled:
            return
        equal = equal_shares(len(times), self.replica.leaves)
        current = self._shares or equal
        shares, reason = self._rule.decide(current, times, decision.exchange_us)
        if shares == current:
            return
        self._shares = () if shares == equal else shares
        self._measured.clear()
        if self.runtime.world.leader:
            what = f"shares {format_shares(shares)} instead of {format_shares(current)}: {reason}"
            log.debug("from step %d on: %s", step + 2, what)
            record_event(self.runtime, "shares", shares=shares, step=step + 1, why=what)

    def _name_slow(self, times: tuple[int, ...]) -> None:
        """Record which workers are slow, each at most once in NAME_EVERY_S. The screen names one
        that has been slow for SLOW_FOR_S, once."""
        if not self._slow and not find_slow(times, ()):
            return
        size = self.replica.workers_per_replica
        names = [self._name(range(i * size, (i + 1) * size)) for i in range(len(times))]
        found = find_slow(times, [i for i, name in enumerate(names) if name in self._slow])
        now_s = time.monotonic()
        self._slow = {names[i]: self._slow.get(names[i], now_s) for i in found}
        recovered = sorted(self._shown - self._slow.keys())
        self._shown &= self._slow.keys()
        if not self.runtime.world.leader:
            return
        if recovered:
            log.info("%s: no longer slow", join_names(recovered))
        median_s = median_low(times) / 1e6
        for i in found:
            self._tell(names[i], times[i] / 1e6, median_s, now_s)

    def _tell(self, worker: str, seconds: float, median_s: float, now_s: float) -> None:
        """Record a slow worker where that is due, and show it."""
        if now_s - self._recorded_s.get(worker, -math.inf) >= NAME_EVERY_S:
            self._recorded_s[worker] = now_s
            record_event(self.runtime, "slow", worker=worker, seconds=seconds, median=median_s)
        if worker in self._shown or now_s - self._slow[worker] < SLOW_FOR_S:
            return
        self._shown.add(worker)
        log.warning(
            "%s: %.3g s per micro-batch, %.1f times the median of %.3g s",
            worker,
            seconds,
            seconds / median_s,
            median_s,
        )

    def _name(self, ranks: range) -> str:
        """Return "worker 1 on host b" for the ranks of a replica."""
        members = self.runtime.world.members
        if not members:
            return f"rank {'-'.join(str(rank) for rank in sorted({ranks[0], ranks[-1]}))}"
        places = [members[rank].rsplit("/", 2) for rank in ranks]
        return join_names([f"worker {slot} on host {host}" for host, slot, _ in places])
