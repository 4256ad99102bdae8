"""`lockstep launch --ray` without a cluster: its reservation, and refused options."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.agent.ray_nodes import Reservation, choose_reservation, connected, no_room
from lockstep.cli.main import main
from lockstep.errors import UsageError

CPUS = {"10.0.0.1 (head)": {"CPU": 0.0}, "10.0.0.2 (b)": {"CPU": 4.0}, "10.0.0.3 (c)": {"CPU": 1.0}}
GPUS = {
    "10.0.0.1 (head)": {"CPU": 8.0},
    "10.0.0.2 (b)": {"CPU": 64.0, "GPU": 8.0},
    "10.0.0.3 (c)": {"CPU": 64.0, "GPU": 4.0},
}


def test_a_reservation_takes_all_nodes_that_have_room() -> None:
    assert choose_reservation(CPUS, None, None) == Reservation(1, 2, {"CPU": 2.0})
    assert choose_reservation(CPUS, None, 1) == Reservation(2, 1, {"CPU": 1.0})
    assert choose_reservation(CPUS, 3, 1) == Reservation(3, 1, {"CPU": 1.0})
    assert choose_reservation(GPUS, None, None) == Reservation(2, 4, {"CPU": 4.0, "GPU": 4.0})
    assert choose_reservation(GPUS, None, 8) == Reservation(1, 8, {"CPU": 8.0, "GPU": 8.0})
    assert choose_reservation({}, None, None) == Reservation(1, 2, {"CPU": 2.0})


def test_too_few_nodes_are_an_error_with_their_resources() -> None:
    error = no_room(CPUS, Reservation(3, 1, {"CPU": 1.0}), 60)
    assert error.what == "2 of 3 Ray nodes have 1 CPU, after 60 s"
    assert error.where.endswith(
        "the cluster has 10.0.0.1 (head): 0 CPU; 10.0.0.2 (b): 4 CPU; 10.0.0.3 (c): 1 CPU"
    )
    assert "--nodes 2" in error.hint
    busy = no_room(GPUS, Reservation(2, 4, {"CPU": 4.0, "GPU": 4.0}), 5)
    assert (
        busy.what == "2 of 2 Ray nodes have 4 CPU and 4 GPU, after 5 s, but other work uses them"
        and "ray status" in busy.hint
    )


def test_a_missing_ray_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(
            UsageError,
            match=r"ray cannot be imported.*\n  --ray\n  pip install 'lockstep-train\[ray\]'",
        ),
        connected(),
    ):
        pass


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "no.such.host.invalid:6379", "127.0.0.1:70000"],
)
def test_an_address_without_a_cluster_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setenv("RAY_ADDRESS", address)
    with (
        pytest.raises(
            UsageError,
            match=rf"no Ray cluster answers: .*\n  RAY_ADDRESS={re.escape(address)}\n  start a node",
        ),
        connected(),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ray", "--hosts", "hosts.toml"], "--ray cannot be combined with --hosts"),
        (["--ray", "--ssh"], "--ray cannot be combined with --ssh"),
        (["--ray", "--address", "10.0.0.1"], "--ray cannot be combined with --address"),
        (["--hosts", "hosts.toml", "--nodes", "2"], "--nodes cannot be combined with --hosts"),
        (
            ["--nodes", "2", "--workers", "1", "--min", "3"],
            "--min 3 exceeds the number of workers, 2",
        ),
        (
            ["--nodes", "2", "--workers", "1", "--address=-x"],
            "address: String should match pattern",
        ),
        (
            ["--nodes", "2", "--workers", "1", "--address", "no.such.host.invalid"],
            "cannot resolve no.such.host.invalid",
        ),
    ],
)
def test_wrong_combinations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["launch", *words, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
