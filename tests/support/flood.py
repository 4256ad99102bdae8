"""Keep COUNT silent connections open to each address until killed: `flood.py COUNT ADDRESS:PORT
...`.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from contextlib import suppress


def open_connection(selector: selectors.BaseSelector, address: tuple[str, int]) -> None:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(address)
    selector.register(connection, selectors.EVENT_READ, address)


def flood(count: int, addresses: list[tuple[str, int]]) -> None:
    selector = selectors.DefaultSelector()
    for address in addresses:
        for _ in range(count):
            open_connection(selector, address)
    print("flooding", flush=True)
    while True:
        for key, _ in selector.select(0.01):
            received = b""
            with suppress(OSError):
                received = key.fileobj.recv(65536)  # type: ignore[union-attr]
            if not received:  # closed by the peer: open another one
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                open_connection(selector, key.data)
        time.sleep(0.01)


if __name__ == "__main__":
    parts = [word.rpartition(":") for word in sys.argv[2:]]
    flood(int(sys.argv[1]), [(host, int(port)) for host, _, port in parts])
