"""Rendezvous without an agent: missing, duplicate and contradicting ranks, busy and unreachable ports.

Threads of this process are the workers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lockstep.elastic.rendezvous import StoreConnection, listen_on_master_port, rendezvous
from lockstep.errors import UsageError
from lockstep.runtime.environment import RankInfo
from lockstep.runtime.sockets import choose_interface, reserve_port


def rank_info(rank: int, size: int, port: int, **changed: Any) -> RankInfo:
    return replace(RankInfo(rank, size, 0, 1, "127.0.0.1", port, "hand"), **changed)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def rendezvous_in_threads(
    *infos: RankInfo, timeout_s: float, connections: Sequence[StoreConnection | None] = ()
) -> list[BaseException | None]:
    """Return the error of each worker in a rendezvous; None: no error."""
    errors: list[BaseException | None] = [None] * len(infos)
    stores: list[Any] = [None] * len(
        infos
    )  # keep rank 0's store alive until all are done, as a process does

    def join(index: int) -> None:
        try:
            connection = connections[index] if connections else None
            stores[index] = rendezvous(infos[index], timeout_s, connection)
        except Exception as error:
            errors[index] = error

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(infos))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_missing_ranks_are_named_and_training_does_not_start() -> None:
    port = free_port()
    errors = rendezvous_in_threads(rank_info(0, 4, port), rank_info(2, 4, port), timeout_s=1.0)
    for error in errors:
        assert type(error).__name__ == "PeersLostError"
    assert any(
        "2 of 4 workers arrived within 1 s: missing rank 1, 3" in str(error) for error in errors
    )


def test_a_duplicate_rank_is_an_error() -> None:
    port = free_port()
    errors = rendezvous_in_threads(
        rank_info(0, 2, port), rank_info(1, 2, port), rank_info(1, 2, port), timeout_s=20.0
    )
    assert errors[0] is None
    assert sorted(str(error).split("\n")[0] for error in errors[1:]) == [
        "None",
        "UsageError: another worker already has rank 1",
    ]


def test_the_same_processes_form_further_groups_and_an_extra_rank_stays_an_error() -> None:
    infos = [rank_info(rank, 2, port) for port in [free_port()] for rank in (0, 1)]
    connections = [StoreConnection() for _ in infos]
    for _ in range(3):
        assert rendezvous_in_threads(*infos, timeout_s=20.0, connections=connections) == [
            None,
            None,
        ]
    (error,) = rendezvous_in_threads(infos[1], timeout_s=1.0)
    assert "UsageError: another worker already has rank 1" in str(error)


def test_different_world_sizes_are_an_error() -> None:
    port = free_port()
    errors = rendezvous_in_threads(rank_info(0, 2, port), rank_info(1, 3, port), timeout_s=1.0)
    assert any("UsageError: different world sizes: " in str(error) for error in errors)


def test_an_unreachable_master_is_reported_with_its_address() -> None:
    port = free_port()
    (error,) = rendezvous_in_threads(rank_info(1, 2, port), timeout_s=0.3)
    assert (
        f"PeersLostError: rank 1 cannot reach rank 0 at 127.0.0.1:{port}: [Errno 111] Connection refused"
        in str(error)
    )
    (error,) = rendezvous_in_threads(
        rank_info(1, 2, port, master_addr="no-such-host.invalid"), timeout_s=0.3
    )
    assert "cannot reach rank 0 at no-such-host.invalid" in str(error)


def test_a_busy_master_port_is_reported_with_its_number() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (error,) = rendezvous_in_threads(rank_info(0, 2, port), timeout_s=0.3)
    assert f"UsageError: port {port} is busy" in str(error)


def test_rank_0_listens_on_a_reserved_port_and_no_other_process_gets_it() -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        errors = rendezvous_in_threads(rank_info(0, 2, port), rank_info(1, 2, port), timeout_s=20.0)
        assert errors == [None, None]
        assert port not in {free_port() for _ in range(100)}


def test_gloo_uses_the_interface_of_the_route_and_never_loopback_between_machines() -> None:
    assert choose_interface({}, rank_info(0, 2, 1, local_size=2, master_addr="anywhere"))[0] == "lo"
    assert choose_interface({"GLOO_SOCKET_IFNAME": "eth7"}, rank_info(0, 2, 1)) == (
        "",
        "GLOO_SOCKET_IFNAME",
    )
    with pytest.raises(UsageError, match="other machines cannot reach it"):
        choose_interface({}, rank_info(0, 2, 1))


@pytest.mark.parametrize(
    ("address", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("192.0.2.1", "::")],
)
def test_the_store_listens_on_the_master_address_if_this_machine_has_it(
    address: str, bound: str
) -> None:
    with socket.socket(
        fileno=listen_on_master_port(rank_info(0, 2, free_port(), master_addr=address))
    ) as listening:
        own = listening.getsockname()[0]
    assert (
        own == bound or (address, own) == ("localhost", "::1") or (bound, own) == ("::", "0.0.0.0")
    )
