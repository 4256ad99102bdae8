"""Measure the coordinator's processor time for a start, a heartbeat and a loss, with 64 to 4,096 members.

    python -m bench.growth.protocol               the table of docs/scaling.md
    python -m bench.growth.protocol --keep NAME   kept under bench/growth/DATE-NAME/

The protocol and the frames are the real ones. There are no sockets: no machine at hand holds 4,096 workers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from support.many_members import ManyMembers

from bench.results import keep, machine
from lockstep.elastic.link import Signer, encode_frame
from lockstep.elastic.protocol.state import Effect, Send

SIZES = (64, 256, 1024, 4096)
ONE_BY_ONE = 256  # with more members, a turn for each report is not measured
SIGNER = Signer(b"key")


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    started_s = time.process_time()
    result = function()
    return time.process_time() - started_s, result


def send(effects: Iterable[Effect]) -> int:
    """Encode and sign the messages as the connections do: once per message, then once per link. Return their bytes."""
    newest: tuple[object, bytes] = (None, b"")
    count = 0
    for effect in effects:
        if isinstance(effect, Send):
            if effect.message is not newest[0]:
                newest = effect.message, json.dumps(effect.message).encode()
            count += len(encode_frame(newest[1], SIGNER))
    return count


def loss(cluster: ManyMembers, *, one_by_one: bool) -> dict[str, float]:
    """One of the members exits. Return seconds of the coordinator until it proposes, and bytes that it sends."""
    lost, protocol, now_s = (
        cluster.members[len(cluster.members) // 2],
        cluster.protocol,
        cluster.now_s,
    )
    frames = [(id, json.dumps(message).encode()) for id, message in cluster.reports(lost)]

    def propose() -> Sequence[Effect]:
        effects = [*cluster.lose(lost), *cluster.leave()]
        send(effects)
        for id, text in frames:
            SIGNER.next_mac(text)
            effects += protocol.on_message(id, json.loads(text), now_s)
            effects += protocol.advance(now_s) if one_by_one else []
        return [*effects, *protocol.advance(now_s)]

    proposal_s, effects = timed(propose)
    cluster.adopt(effects)
    announcements = [Send(id, protocol.outbox.announcement) for id in protocol.peers.links]
    announce_s, sent_bytes = timed(lambda: send(announcements))
    return {"proposal_s": proposal_s, "announce_s": announce_s, "announced_bytes": sent_bytes}


def measure(members: int) -> dict[str, float]:
    cluster = ManyMembers(members)
    start_s, _ = timed(cluster.start)
    heartbeat_s, _ = timed(lambda: send(cluster.beat()))
    row = {
        "members": members,
        "start_s": start_s,
        "heartbeat_s": heartbeat_s,
        **loss(cluster, one_by_one=False),
    }
    if members <= ONE_BY_ONE:
        row["one_by_one_s"] = loss(cluster, one_by_one=True)["proposal_s"]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5, help="repetitions; the medians are shown")
    parser.add_argument("--keep", metavar="NAME")
    args = parser.parse_args()
    load, raw = os.getloadavg(), [measure(members) for _ in range(args.times) for members in SIZES]
    lines = [
        "| members | start | a heartbeat | loss until the proposal | the same, a turn for each report | announcement | bytes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for members in SIZES:
        rows = [row for row in raw if row["members"] == members]
        seconds = [
            f"{1000 * median(row[name] for row in rows):.1f} ms"
            for name in ("start_s", "heartbeat_s", "proposal_s")
        ]
        slow = (
            f"{1000 * median(row['one_by_one_s'] for row in rows):.0f} ms"
            if members <= ONE_BY_ONE
            else ""
        )
        announce = f"{1000 * median(row['announce_s'] for row in rows):.1f} ms"
        lines.append(
            f"| {members:,} | {' | '.join(seconds)} | {slow} | {announce} | {rows[0]['announced_bytes']:,} |"
        )
    print("\n".join(lines))
    if args.keep:
        print(keep(args.keep, raw, "\n".join(lines), machine("not used", load)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
