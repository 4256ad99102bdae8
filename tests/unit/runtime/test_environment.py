"""Rank detection: each family of launcher variables complete, incomplete and inconsistent."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.runtime.environment import (
    RankInfo,
    choose_device,
    default_worker_count,
    first_host,
    read_rank_info,
    tasks_per_node,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {
    name: TORCHRUN[name]
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
}
PET = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "m",
    "PET_MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
}


def rank_info(environ: dict[str, str]) -> RankInfo:
    info = read_rank_info(environ)
    assert info is not None
    return info


def test_empty_environment_has_no_launcher() -> None:
    assert read_rank_info({"PATH": "/bin", "MASTER_ADDR": "left over"}) is None


def test_torchrun_variables_are_read_and_described() -> None:
    info = read_rank_info(TORCHRUN)
    assert info == RankInfo(
        3,
        4,
        1,
        2,
        "node0",
        29500,
        "torchrun",
        launcher_has_store=True,
        attempt="x-2",
        warnings=info.warnings if info else (),
    )
    assert (
        str(info)
        == "rank 3 of 4, local rank 1 of 2, started by torchrun; rendezvous at node0:29500"
    )


def test_torchrun_with_restarts_warns_about_its_shared_store() -> None:
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in rank_info(TORCHRUN).warnings[0]
    assert not rank_info(TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "0"}).warnings
    assert not rank_info(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).warnings


def test_users_may_set_torchruns_variables() -> None:
    info = rank_info(BY_HAND)
    assert (info.launcher, info.rank, info.master_addr, info.launcher_has_store) == (
        "RANK in the environment",
        3,
        "node0",
        False,
    )


def test_pet_variables_are_one_worker_per_machine() -> None:
    info = rank_info(PET)
    assert (info.rank, info.size, info.local_rank, info.local_size, info.master_port) == (
        1,
        3,
        0,
        1,
        29500,
    )


@pytest.mark.parametrize(
    "change", [{"PET_NPROC_PER_NODE": "4"}, {"PET_NPROC_PER_NODE": "gpu"}, {"PET_NNODES": "1:4"}]
)
def test_pet_variables_for_several_workers_need_torchrun(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="torchrun"):
        read_rank_info(PET | change)


def test_srun_task_has_rank_master_and_a_port_of_its_job() -> None:
    info = rank_info(SRUN)
    assert (info.rank, info.size, info.local_rank, info.local_size, info.master_addr) == (
        5,
        7,
        1,
        2,
        "gpu03",
    )
    assert 12_000 <= info.master_port < 32_000
    assert (
        info.master_port
        == rank_info(SRUN | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0"}).master_port
    )
    assert info.master_port != rank_info(SRUN | {"SLURM_STEP_ID": "3"}).master_port
    named = rank_info(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4444"})
    assert (named.master_addr, named.master_port) == ("10.0.0.1", 4444)


def test_batch_script_of_several_tasks_does_not_train_alone() -> None:
    script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    with pytest.raises(UsageError, match="srun"):
        read_rank_info(script)
    assert read_rank_info(script | {"SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-05,9],x1", "gpu03"),
        ("n1,n2", "n1"),
        ("solo", "solo"),
        ("rack[1-2]-n[01-04]", "rack1-n01"),
        ("a[7]", "a7"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_slurm_tasks_per_node_are_expanded() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(UsageError):
        tasks_per_node("2x3")


@pytest.mark.parametrize("family", [TORCHRUN, BY_HAND, PET, SRUN])
def test_missing_variable_is_named_in_the_error(family: dict[str, str]) -> None:
    optional = (
        "TORCHELASTIC",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_STEP_NUM",
        "SLURM_STEP_NODELIST",
    )
    for name in family:
        if name.startswith(optional):
            continue
        with pytest.raises(UsageError) as failed:
            read_rank_info({key: value for key, value in family.items() if key != name})
        assert name in failed.value.what, name
        assert any(f"{key}={value}" in failed.value.where for key, value in family.items())


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "4"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "5"},
        {"RANK": "0"},
        {"MASTER_PORT": "0"},
        {"MASTER_PORT": "70000"},
    ],
)
def test_inconsistent_numbers_are_an_error_with_their_values(change: dict[str, str]) -> None:
    with pytest.raises(UsageError) as failed:
        read_rank_info(TORCHRUN | change)
    for name, value in change.items():
        assert f"{name}={value}" in str(failed.value)


@pytest.mark.parametrize("value", ["-1", "two", "1.5", " 1"])
def test_non_numbers_are_an_error_with_the_value(value: str) -> None:
    with pytest.raises(UsageError, match=f"RANK='{value}'"):
        read_rank_info(TORCHRUN | {"RANK": value})


def test_device_is_the_local_gpu_or_the_cpu_with_a_reason() -> None:
    info = rank_info(TORCHRUN)
    assert choose_device({}, info, gpus=2) == ("cuda:1", "local rank 1 of 2 GPUs")
    assert choose_device({}, None, gpus=2)[0] == "cuda:0"
    assert choose_device({}, info, gpus=0) == ("cpu", "torch sees no GPU")
    assert choose_device({"LOCKSTEP_DEVICE": "cpu"}, info, gpus=2) == ("cpu", "LOCKSTEP_DEVICE=cpu")
    assert (
        choose_device({}, rank_info(SRUN), gpus=1)[0] == "cuda:0"
    )  # srun binds a GPU to each task
    assert (
        choose_device({"LOCKSTEP_DEVICE": "cuda:0"}, info, gpus=1)[0] == "cuda:0"
    )  # shared: there is no GPU 1


def test_unavailable_device_is_an_error() -> None:
    info = rank_info(TORCHRUN)
    for environ, gpus in (
        ({}, 1),
        ({"LOCKSTEP_DEVICE": "cuda"}, 0),
        ({"LOCKSTEP_DEVICE": "tpu"}, 1),
        ({"LOCKSTEP_DEVICE": "cuda:1"}, 1),
    ):
        with pytest.raises(UsageError):
            choose_device(environ, info, gpus)


def test_default_is_one_worker_per_gpu_or_two_on_a_cpu(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    none = tmp_path / "none"
    assert default_worker_count({"PATH": ""}, none)[0] == 2
    assert default_worker_count({}, tmp_path) == (3, "one for each GPU")
    assert default_worker_count({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path)[0] == 2
    assert default_worker_count({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, tmp_path)[0] == 1
    assert default_worker_count({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == (
        2,
        "two on the CPU (CUDA_VISIBLE_DEVICES=)",
    )
    assert default_worker_count({"LOCKSTEP_DEVICE": "cpu"}, tmp_path)[0] == 2
