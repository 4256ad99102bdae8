"""The doctors of all hosts meet over TCP, at a port that follows from the hosts file.

The run folder could not carry this: whether it is shared is one of the questions. A doctor answers
any host of the network while it runs; its stage and facts are no secret.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

from pydantic import TypeAdapter

from lockstep.agent.hosts import Host
from lockstep.doctor.findings import SHARED_ADDRESS, HostFacts, PeerFacts
from lockstep.doctor.gather import form_group, gather, with_error
from lockstep.doctor.probes import claim_name, lock_name, probes_of, remove_probes
from lockstep.errors import LockstepError, UsageError
from lockstep.object_store.storage import Storage
from lockstep.runtime.exit_report import error_summary
from lockstep.runtime.sockets import source_address

FIRST_PORT, PORTS = 20_000, 10_000  # below the ports that Linux gives to outgoing connections
CONNECT_S, POLL_S = 3.0, 0.2
FILE_S = 10.0  # until a file of another host must appear: NFS caches folders for some seconds
LINK_S, CHUNK = 1.0, 1 << 18  # of a measurement of bandwidth
STAGE_S = 60.0  # between two stages of a host that has answered
# Stages of a doctor.
GATHERED = 1
MEASURED = 2
GROUPED = 3
READ = 4
ASK, SINK = b"ask\n", b"sink\n"


class Handler(StreamRequestHandler):
    """Answers one request: the stage and facts of this host, or how many bytes arrived."""

    server: Meeting

    def handle(self) -> None:
        answer: dict[str, Any] = {
            "time": time.time(),
            "stage": self.server.stage,
            "facts": asdict(self.server.facts),
        }
        if self.rfile.readline(16) == SINK:
            answer = {"received": sum(map(len, iter(lambda: self.rfile.read1(CHUNK), b"")))}
        self.wfile.write(json.dumps(answer).encode())


class Meeting(ThreadingTCPServer):
    """The stages and facts of this host and its peers.

    errors  by name, of the peers that did not answer
    known   by name, the facts of the others
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, me: Host, address: str, peers: Sequence[Host]) -> None:
        self.peers = peers
        self.stage = 0
        self.facts = HostFacts(me.name)
        self.errors: dict[str, str] = {}
        self.known: dict[str, HostFacts] = {}
        self.stages = dict.fromkeys((peer.name for peer in peers), 0)
        addresses = " ".join(sorted(host.reached_at for host in (me, *peers)))
        self.port = FIRST_PORT + zlib.crc32(addresses.encode()) % PORTS
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            super().__init__((address, self.port), Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {address}:{self.port}: {error.strerror}",
                f"host {me.name} of the hosts file",
                "is another doctor running, or the address another host's? "
                f"ss -ltnp 'sport = :{self.port}'; ip -br addr",
            ) from None
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def enter_stage(self, stage: int, facts: HostFacts, timeout_s: float = STAGE_S) -> None:
        """Publish the facts of this host, and wait until all peers are at `stage` or beyond."""
        self.facts, self.stage = facts, stage  # in this order: a thread reads them
        until_s = time.monotonic() + timeout_s
        while behind := [
            peer
            for peer in self.peers
            if peer.name not in self.errors and self.stages[peer.name] < stage
        ]:
            for peer in behind:
                error, has_left = f"no progress for {timeout_s:g} s", False
                try:
                    answer = self.ask(peer, ASK)
                    facts_of_peer = TypeAdapter(HostFacts).validate_python(answer["facts"])
                    if facts_of_peer.host != peer.name:
                        self.errors[peer.name] = (
                            f"host {facts_of_peer.host} answers, {SHARED_ADDRESS},"
                        )
                        continue
                    self.known[peer.name] = facts_of_peer
                    self.stages[peer.name] = answer["stage"]
                except (OSError, ValueError, LookupError) as failure:
                    error = (getattr(failure, "strerror", None) or str(failure)).lower()
                    has_left = isinstance(failure, ConnectionError) and self.stages[peer.name] > 0
                if has_left and self.stages[peer.name] >= GROUPED:
                    self.stages[peer.name] = READ  # its facts are complete
                elif has_left or time.monotonic() > until_s:
                    self.errors[peer.name] = error
            time.sleep(POLL_S)

    def ask(self, peer: Host, request: bytes, seconds: float = 0.0) -> dict[str, Any]:
        """Return a peer's answer, after sending bytes for so long. OSError, ValueError."""
        with socket.create_connection(
            (peer.reached_at, self.port), timeout=CONNECT_S
        ) as connection:
            connection.sendall(request)
            until_s = time.monotonic() + seconds
            connection.settimeout(CONNECT_S + 10 * seconds)
            while time.monotonic() < until_s:
                connection.sendall(bytes(CHUNK))
            connection.shutdown(socket.SHUT_WR)
            answer: dict[str, Any] = json.loads(
                b"".join(iter(lambda: connection.recv(1 << 16), b""))
            )
            return answer

    def measure(self, peer: Host, *, rate: bool) -> PeerFacts:
        """Return the facts about a peer. rate: with the bandwidth to it."""
        at, asked = f"{peer.reached_at}:{self.port}", []
        if peer.name in self.errors:
            return PeerFacts(self.errors[peer.name], at)
        try:
            for _ in range(5):
                start_s = time.time()
                remote_s, end_s = self.ask(peer, ASK)["time"], time.time()
                asked.append((end_s - start_s, remote_s - (start_s + end_s) / 2))
            start_s = time.monotonic()
            received = self.ask(peer, SINK, LINK_S)["received"] if rate else 0
            bytes_per_s = received / (time.monotonic() - start_s)
            return PeerFacts(
                "",
                at,
                source_address(peer.reached_at, self.port),
                clock_s=min(asked)[1],
                bytes_per_s=bytes_per_s,
            )
        except (OSError, ValueError) as error:
            return PeerFacts(f"connection failed: {error}", at)


def examine(me: Host, hosts: Sequence[Host], run: str, wait_s: float) -> list[HostFacts]:
    """Collective. Return the facts of this host and of the hosts it reaches, in the order of
    `hosts`.

    run     folder, or address in a store
    wait_s  for hosts that do not answer
    """
    address, after = me.resolve(), hosts[(hosts.index(me) + 1) % len(hosts)]
    with Meeting(me, address, [host for host in hosts if host is not me]) as meeting:
        facts = gather(me, address, run)
        meeting.enter_stage(GATHERED, facts, wait_s)
        files = {
            name: known.file
            for name, known in meeting.known.items()
            if known.file and name not in meeting.errors
        }
        unseen: set[str] = set()
        is_claimed = False
        lock = None
        claim = f"claim-{min([facts.file, *files.values()])}"
        if facts.file:
            probes = probes_of(run)
            unseen = set(files.values()) - wait_for_files(probes, set(files.values()))
            is_claimed = claim_name(probes, claim, facts.file)
            lock = lock_name(probes, claim)
        peers = {}
        for peer in meeting.peers:
            measured = meeting.measure(peer, rate=peer is after)
            peers[peer.name] = replace(measured, sees_file=files.get(peer.name) not in unseen)
        facts = replace(facts, peers=peers, is_claimed=is_claimed, is_locked=lock is not None)
        meeting.enter_stage(MEASURED, facts)
        if lock is not None:
            os.close(lock)  # all hosts have tried it
        meeting.enter_stage(GROUPED, try_group(meeting, hosts, hosts.index(me)))
        lost = {
            name: replace(peer, error=peer.error or meeting.errors.get(name, ""))
            for name, peer in peers.items()
        }
        meeting.enter_stage(READ, replace(meeting.facts, peers=lost), CONNECT_S)
        if facts.file:
            remove_probes(probes, [claim, facts.file])
    known = {**meeting.known, me.name: meeting.facts}
    return [known[host.name] for host in hosts if host.name in known]


def wait_for_files(probes: Storage, names: set[str]) -> set[str]:
    """Return the files that have appeared: all of them, or as many as after FILE_S."""
    until_s = time.monotonic() + FILE_S
    while (seen := names & set(probes.names())) < names and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return seen


def try_group(meeting: Meeting, hosts: Sequence[Host], rank: int) -> HostFacts:
    """Collective. Form a process group if all hosts reach each other; return the facts with the
    result."""
    facts = meeting.facts
    everyone = [*meeting.known.values(), facts]
    broken = any(
        {"interface", "ports", "versions"} & set(host.errors)
        or any(peer.error for peer in host.peers.values())
        for host in everyone
    )
    if broken or meeting.errors or len(hosts) == 1:
        return facts
    port = {host.host: host.master_port for host in everyone}[hosts[0].name]
    try:
        group = form_group(rank, len(hosts), facts.address, hosts[0].reached_at, port)
    except (LockstepError, RuntimeError) as error:
        return with_error(facts, "group", error_summary(error))
    return replace(facts, group=group)
