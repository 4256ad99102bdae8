"""Work that the workers of a host do once for all of them."""

from __future__ import annotations

import secrets
from pathlib import Path

from lockstep.data.file_digests import FileDigests
from lockstep.elastic.collectives import run_on_rank0
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.runtime.worker_env import state_folder


def digests_on_host(runtime: ElasticRuntime, folder: Path) -> FileDigests:
    """Collective in a static group. Return the digests that this host shares in this start."""
    if runtime.membership:
        env = runtime.membership.worker_env
        return FileDigests(Path(env.state) / "file_digests.json", f"after generation {env.after_generation}")
    start = run_on_rank0(runtime, lambda: secrets.token_hex(8))
    if runtime.world.local_size == 1:
        return FileDigests()
    return FileDigests(state_folder(folder, runtime.world.host) / "file_digests.json", start)
