"""Who am I: every family of variables, whole, halved and contradicting itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.runtime.environment import Place, choose_device, find_place, first_host, tasks_per_node
from lockstep.runtime.subprocesses import default_workers

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
OURS = {
    "LOCKSTEP_RANK": "0",
    "LOCKSTEP_SIZE": "2",
    "LOCKSTEP_LOCAL_RANK": "0",
    "LOCKSTEP_LOCAL_SIZE": "2",
    "LOCKSTEP_MASTER_ADDR": "127.0.0.1",
    "LOCKSTEP_MASTER_PORT": "4000",
    "LOCKSTEP_LISTEN_FD": "7",
}
PET = {"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29500"}
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


def place_of(environ: dict[str, str]) -> Place:
    place, _ = find_place(environ)
    assert place is not None
    return place


def test_an_empty_environment_is_one_machine_where_workers_may_be_started() -> None:
    place, reason = find_place({"PATH": "/bin", "MASTER_ADDR": "left over"})
    assert place is None
    assert "one machine" in reason


def test_torchruns_variables_are_taken_and_named_in_one_line() -> None:
    place, reason = find_place(TORCHRUN)
    assert place == Place(3, 4, 1, 2, "node0", 29500, "torchrun", store_given=True, attempt="x-2", warnings=place.warnings if place else ())
    assert reason == "rank 3 of 4, local rank 1 of 2, by torchrun; they meet at node0:29500"


def test_torchrun_with_restarts_is_warned_of_its_shared_store_and_not_without() -> None:
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in place_of(TORCHRUN).warnings[0]
    assert not place_of(TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "0"}).warnings
    assert not place_of(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).warnings


def test_our_own_variables_come_first_and_carry_the_listening_socket() -> None:
    both = OURS | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    place = place_of(both)
    assert (place.starter, place.listen_fd, place.master_addr, place.store_given) == ("lockstep", 7, "127.0.0.1", False)


def test_two_starters_that_disagree_are_an_error_with_both_values() -> None:
    with pytest.raises(UsageError) as failed:
        find_place(OURS | TORCHRUN)
    assert "LOCKSTEP_RANK=0" in str(failed.value) and " RANK=3" in str(failed.value)


def test_pet_variables_make_one_worker_a_machine() -> None:
    place = place_of(PET)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.master_port) == (1, 3, 0, 1, 29500)


@pytest.mark.parametrize("change", [{"PET_NPROC_PER_NODE": "4"}, {"PET_NPROC_PER_NODE": "gpu"}, {"PET_NNODES": "1:4"}])
def test_pet_variables_for_more_are_sent_to_torchrun(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="torchrun"):
        find_place(PET | change)


def test_a_task_of_srun_knows_its_place_its_master_and_a_port_of_its_job() -> None:
    place = place_of(SRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.master_addr) == (5, 7, 1, 2, "gpu03")
    assert 12_000 <= place.master_port < 32_000
    assert place.master_port == place_of(SRUN | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0"}).master_port
    assert place.master_port != place_of(SRUN | {"SLURM_STEP_ID": "3"}).master_port
    named = place_of(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4444"})
    assert (named.master_addr, named.master_port) == ("10.0.0.1", 4444)


def test_a_batch_script_of_many_tasks_does_not_train_alone() -> None:
    script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    with pytest.raises(UsageError, match="srun"):
        find_place(script)
    assert find_place(script | {"SLURM_NTASKS": "1"})[0] is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-05,9],x1", "gpu03"), ("n1,n2", "n1"), ("solo", "solo"), ("rack[1-2]-n[01-04]", "rack1-n01"), ("a[7]", "a7")],
)
def test_the_first_host_of_slurms_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_slurms_tasks_per_node_are_counted_out() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(UsageError):
        tasks_per_node("2x3")


@pytest.mark.parametrize("family", [TORCHRUN, OURS, PET, SRUN])
def test_every_family_with_one_variable_missing_is_an_error_that_names_it(family: dict[str, str]) -> None:
    optional = ("TORCHELASTIC", "LOCKSTEP_LISTEN", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM", "SLURM_STEP_NODELIST")
    for name in family:
        if name.startswith(optional):
            continue
        with pytest.raises(UsageError) as failed:
            find_place({key: value for key, value in family.items() if key != name})
        assert name in failed.value.what, name
        assert any(f"{key}={value}" in failed.value.where for key, value in family.items())


@pytest.mark.parametrize(
    "change",
    [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "5"}, {"RANK": "0"}, {"MASTER_PORT": "0"}, {"MASTER_PORT": "70000"}],
)
def test_numbers_that_contradict_one_another_are_an_error_with_the_values(change: dict[str, str]) -> None:
    with pytest.raises(UsageError) as failed:
        find_place(TORCHRUN | change)
    for name, value in change.items():
        assert f"{name}={value}" in str(failed.value)


@pytest.mark.parametrize("value", ["-1", "two", "1.5", " 1"])
def test_what_is_no_number_is_an_error_with_the_value(value: str) -> None:
    with pytest.raises(UsageError, match=f"RANK='{value}'"):
        find_place(TORCHRUN | {"RANK": value})


def test_the_device_is_the_local_gpu_or_the_cpu_with_the_reason() -> None:
    place = place_of(TORCHRUN)
    assert choose_device({}, place, gpus=2) == ("cuda:1", "local rank 1 of 2 GPUs")
    assert choose_device({}, None, gpus=2)[0] == "cuda:0"
    assert choose_device({}, place, gpus=0) == ("cpu", "torch sees no GPU")
    assert choose_device({"LOCKSTEP_DEVICE": "cpu"}, place, gpus=2) == ("cpu", "LOCKSTEP_DEVICE=cpu")
    assert choose_device({}, place_of(SRUN), gpus=1)[0] == "cuda:0"  # srun binds a GPU to each task


def test_a_device_that_is_not_there_is_an_error() -> None:
    place = place_of(TORCHRUN)
    for environ, gpus in (({}, 1), ({"LOCKSTEP_DEVICE": "cuda"}, 0), ({"LOCKSTEP_DEVICE": "tpu"}, 1)):
        with pytest.raises(UsageError):
            choose_device(environ, place, gpus)


def test_a_machine_gets_a_worker_for_each_gpu_and_two_without(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    none = tmp_path / "none"
    assert default_workers({"PATH": ""}, none)[0] == 2
    assert default_workers({}, tmp_path) == (3, "one for each GPU")
    assert default_workers({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path)[0] == 2
    assert default_workers({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, tmp_path)[0] == 1
    assert default_workers({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == (2, "two on the CPU (CUDA_VISIBLE_DEVICES=)")
    assert default_workers({"LOCKSTEP_DEVICE": "cpu"}, tmp_path)[0] == 2
