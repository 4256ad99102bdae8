"""Keep as many connections as asked open to each address, and say nothing: `flood.py COUNT ADDRESS:PORT ...`. Ends when killed."""

from __future__ import annotations

import selectors
import socket
import sys
import time
from contextlib import suppress


def open_one(selector: selectors.BaseSelector, address: tuple[str, int]) -> None:
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(address)
    selector.register(one, selectors.EVENT_READ, address)


def flood(count: int, addresses: list[tuple[str, int]]) -> None:
    selector = selectors.DefaultSelector()
    for address in addresses:
        for _ in range(count):
            open_one(selector, address)
    print("flooding", flush=True)
    while True:
        for key, _ in selector.select(0.01):
            said = b""
            with suppress(OSError):
                said = key.fileobj.recv(65536)  # type: ignore[union-attr]
            if not said:  # closed by the other side: take the next place
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                open_one(selector, key.data)
        time.sleep(0.01)


if __name__ == "__main__":
    named = [word.rpartition(":") for word in sys.argv[2:]]
    flood(int(sys.argv[1]), [(host, int(port)) for host, _, port in named])
