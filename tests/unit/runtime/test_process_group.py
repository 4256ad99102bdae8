"""The backend of torch's groups, and how NCCL's communicators connect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.runtime.process_group import choose_backend, init_default_group, new_subgroup

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "environ", "backend"),
    [
        ("cpu", {}, "gloo"),
        ("cuda:1", {"LOCKSTEP_DEVICE": "cuda"}, "cpu:gloo,cuda:nccl"),
        ("cuda:0", {"LOCKSTEP_DEVICE": "cuda:0"}, "gloo"),
        (
            "cuda:0",
            {"LOCKSTEP_DEVICE": "cuda:0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
            "cpu:gloo,cuda:nccl",
        ),
    ],
)
def test_nccl_serves_workers_with_a_gpu_of_their_own(
    device: str, environ: dict[str, str], backend: str
) -> None:
    assert choose_backend(torch.device(device), environ) == backend


def test_communicators_connect_when_the_group_forms_and_are_not_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch splits the communicator of a default group that has a device, for which it needs all
    ranks; but only the members of a subgroup form it."""
    formed: list[tuple[str, Any, float]] = []
    init, new_group = dist.init_process_group, dist.new_group

    def init_with_gloo(backend: str, *, device_id: Any = None, **options: Any) -> None:
        formed.append((backend, device_id, options["timeout"].total_seconds()))
        init("gloo", **options)
        dist.group.WORLD.bound_device_id = device_id

    def new_group_of_one(ranks: list[int], *, device_id: Any = None, **options: Any) -> Any:
        formed.append(("", device_id, options["timeout"].total_seconds()))
        return new_group([0], **options)

    monkeypatch.delenv("LOCKSTEP_DEVICE", raising=False)
    monkeypatch.setattr(dist, "init_process_group", init_with_gloo)
    monkeypatch.setattr(dist, "new_group", new_group_of_one)
    monkeypatch.setattr(dist, "get_backend_config", lambda: formed[0][0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    try:
        init_default_group(dist.HashStore(), 0, 1, GPU, 60.0)
        assert dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is None
        new_subgroup([0, 1])
    finally:
        dist.destroy_process_group()
    assert formed == [("cpu:gloo,cuda:nccl", GPU, 60.0), ("", GPU, 60.0)]
