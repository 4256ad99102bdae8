"""Play a schedule over links, without sending anything.

The model: a message takes its link's latency and then its bytes at the link's rate. A rank has one
full-duplex port: it sends one message at a time, and receives one at a time. The ranks of a host
share one such port to the other hosts. A rank starts a round when it has done its own moves of the
rounds before. Additions take no time. Bytes are fractions: nothing is rounded to whole elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.network.moves import Link, Move, Phase, Schedule
from lockstep.network.tree_exchange import WHOLE

STEADY = 1e-9  # relative difference of growths that are rounding errors


@dataclass(frozen=True)
class Network:
    """The link between two hosts, and that between two ranks of a host."""

    between: Link
    inside: Link
    ranks_per_host: int = 1


class Simulation:
    """A schedule for `ranks` ranks, played on buffers of `size` bytes.

    messages, bytes  sent by each rank
    round_ends_s     when the last message of each round has arrived
    """

    def __init__(self, schedule: Schedule, ranks: int, size: float, network: Network) -> None:
        self.network = network
        self.bytes_per_unit = size / WHOLE
        self.messages = [0] * ranks
        self.bytes = [0.0] * ranks
        self.round_ends_s: list[float] = []
        hosts = ranks // network.ranks_per_host
        # When the ranks have done their rounds, and the hosts can send and receive again: [N
        # ranks, H hosts, H hosts].
        self._times_s = [0.0] * (ranks + 2 * hosts)
        for phase in schedule:
            self._play_phase(phase)
        self.seconds = max(self.round_ends_s)

    def _play_phase(self, phase: Phase) -> None:
        """Play the rounds until all times grow by the same amount; each further round adds it
        again."""
        for k in range(phase.times):
            moves = phase.moves(k)
            before_s = self._times_s[:] if phase.times > 1 else []
            self._play_round(moves)
            if k == 0:
                self._count(moves, phase.times)
            if not before_s:
                return
            growths = [now - before for now, before in zip(self._times_s, before_s, strict=True)]
            low = min(filter(None, growths), default=0.0)
            high = max(growths)
            if high - low <= STEADY * high:
                more = phase.times - k - 1
                end_s = self.round_ends_s[-1]
                self.round_ends_s += [end_s + (i + 1) * high for i in range(more)]
                for number, growth in enumerate(growths):
                    self._times_s[number] += more * growth
                return

    def _play_round(self, moves: list[Move]) -> None:
        """Start each message, in order, as soon as the ports at both ends are free."""
        times_s = self._times_s
        per_host = self.network.ranks_per_host
        ranks = len(self.messages)
        hosts = ranks // per_host
        sent_s: dict[int, float] = {}
        received_s: dict[int, float] = {}
        for sender, receiver, start, stop, _ in moves:
            size = (stop - start) * self.bytes_per_unit
            free_s = sent_s.get(sender, times_s[sender])
            begin_s = max(free_s, received_s.get(receiver, times_s[receiver]))
            out = ranks + sender // per_host
            into = ranks + hosts + receiver // per_host
            if out + hosts == into:
                end_s = begin_s + self.network.inside.seconds(size)
            else:
                begin_s = max(begin_s, times_s[out], times_s[into])
                end_s = begin_s + self.network.between.seconds(size)
                times_s[out] = times_s[into] = end_s
            sent_s[sender] = received_s[receiver] = end_s
        for rank, end_s in (*sent_s.items(), *received_s.items()):
            times_s[rank] = max(times_s[rank], end_s)
        self.round_ends_s.append(max(sent_s.values()))

    def _count(self, moves: list[Move], rounds: int) -> None:
        for move in moves:
            self.messages[move.sender] += rounds
            self.bytes[move.sender] += rounds * (move.stop - move.start) * self.bytes_per_unit


def best_by_size(
    seconds: Callable[[str, float], float], names: Sequence[str], size: float
) -> list[tuple[float, str]]:
    """Return [(bytes, the fastest algorithm from that size on)], smallest size first.

    Each algorithm takes about its latency plus a slope times the bytes: straight lines cross once.
    seconds  of an algorithm and a number of bytes; not quite straight where messages wait for ports
    size     at which the slopes are measured; near a crossing they are measured again
    """
    latency = {name: seconds(name, 0) for name in names}

    def slope(name: str, at: float) -> float:
        return (seconds(name, at) - latency[name]) / at

    def crossing(slow: str, fast: str, at: float) -> float:
        return (latency[fast] - latency[slow]) / (slope(slow, at) - slope(fast, at))

    best = [(0.0, min(names, key=lambda name: (latency[name], slope(name, size))))]
    while flatter := [
        name for name in names if slope(name, size) < (1 - STEADY) * slope(best[-1][1], size)
    ]:
        at, name = min((crossing(best[-1][1], name, size), name) for name in flatter)
        for _ in range(2):
            if slope(best[-1][1], at) > slope(name, at):
                at = crossing(best[-1][1], name, at)
        best.append((at, name))
    return best
