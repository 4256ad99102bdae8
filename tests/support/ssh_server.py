"""An ssh server for tests on machines without sshd: it runs commands in a shell, without a
terminal, as sshd does.

    python ssh_server.py FOLDER ADDRESS        reads the keys `host` and `user.pub` from FOLDER; prints a line when ready

The protocol is implemented by asyncssh. Each command runs in its own session and survives a lost
connection, with unread pipes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import asyncssh


async def main(folder: Path, address: str) -> None:
    """Serve until killed."""
    keys = {
        "server_host_keys": [str(folder / "host")],
        "authorized_client_keys": str(folder / "user.pub"),
    }
    await asyncssh.listen(address, 22, process_factory=serve, encoding=None, **keys)
    print("listening", flush=True)
    await asyncio.Event().wait()


async def serve(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Run one command."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    child = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", process.command or "", start_new_session=True, **pipes
    )
    await process.redirect(child.stdin, child.stdout, child.stderr)
    code = await child.wait()
    process.exit(code)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
