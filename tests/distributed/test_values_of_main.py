"""The arguments of a user's function are the values of its run: recorded, compared, overridden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fork_loop import LoopResult, run_loop
from support.launching import one_thread, run_lockstep

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.fingerprints import newest_facts
from lockstep.record.events import read_events
from lockstep.record.metrics import iter_steps

LOOP = """
import os, signal, time, torch, lockstep
from torch import nn

def train(out: str, steps: int = 4, lr: float = 0.1, decay: float = 0.0, scheduled: bool = False,
          keep: int = 3, patience: int = 3, divide_at: int = -1):
    kill_at = int(os.environ.get("KILL_AT", "-1"))
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled else None
    data = torch.utils.data.TensorDataset(torch.rand(24, 2), torch.ones(24, 1))
    with lockstep.Session(out, micro_batches=4, save_every=2, keep=keep, progress=False) as session:
        model, optimizer = session.prepare(model, optimizer)
        if scheduler:
            session.state(scheduler=scheduler)
        loader = session.loader(data, batch_size=8)
        for step in session.steps(steps):
            if step == kill_at and session.world.rank == 1 and session.world.generation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if kill_at >= 0 and session.world.size == 1:
                time.sleep(0.3)  # until the replacement has joined
            for x, y in loader(step):
                session.backward(nn.functional.mse_loss(model(x), y))
            if step == divide_at:
                optimizer.param_groups[0]["lr"] /= 4
            optimizer.step()
            if scheduler:
                scheduler.step()
            group = optimizer.param_groups[0]
            session.log(step, rate=group["lr"], decay=group["weight_decay"])

if __name__ == "__main__":
    lockstep.launch(train, workers=2)
"""
DONE = LoopResult(0, "")


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path / "loop.py"


def saved_values(run: Path) -> dict[str, str]:
    newest = newest_facts(run / "checkpoints")
    assert newest
    values: dict[str, str] = newest[1]["values"]
    return values


def logged(run: Path, name: str) -> list[float]:
    return [line[name] for line in iter_steps(run / "metrics.jsonl")]


def overrides(run: Path) -> list[tuple[int, Any]]:
    events = [event for event in read_events(run) if event["event"] == "override"]
    return [(event["step"], event["values"]) for event in events]


def test_another_value_is_refused_with_both_values_and_accepted_with_override(
    loop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_loop(loop, run, 2) == DONE
    assert saved_values(run)["lr"] == "0.1" and saved_values(run)["decay"] == "0.0"
    before = digest_line(run)

    refused = run_loop(loop, run, 2, steps=8, lr=0.05)
    assert refused.code and "step 4 was trained with lr = 0.1" in refused.text
    assert "this start has lr = 0.05" in refused.text
    assert "--override lr=0.05" in refused.text
    assert digest_line(run) == before and overrides(run) == []

    assert run_loop(loop, run, 2, steps=6, override=["lr=0.05"]) == DONE
    assert overrides(run) == [(4, {"lr": "0.05"})]
    assert logged(run, "rate") == [0.1] * 4 + [0.05] * 2, "in effect, not the checkpoint's rate"
    assert saved_values(run)["lr"] == "0.05"

    refused = run_loop(loop, run, 1, steps=8)
    assert "step 6 was trained with lr = 0.05, and this start has lr = 0.1" in refused.text
    assert run_loop(loop, run, 1, steps=8, lr="5e-2") == DONE
    assert run_loop(loop, run, 2, steps=10, override=["lr=0.05"]) == DONE, "repeated"
    assert len(overrides(run)) == 1 and logged(run, "rate")[6:] == [0.05] * 4


def test_an_override_has_the_same_bits_on_other_workers_and_in_shards(
    loop: Path, tmp_path: Path
) -> None:
    runs = [tmp_path / "one", tmp_path / "three", tmp_path / "shards"]
    for run, workers, shard in zip(runs, (1, 3, 2), (1, 1, 2), strict=True):
        assert run_loop(loop, run, workers, shard=shard) == DONE
        assert run_loop(loop, run, workers, shard=shard, steps=8, override=["lr=0.02"]) == DONE
    assert len({digest_line(run) for run in runs}) == 1
    plain = tmp_path / "plain"
    assert run_loop(loop, plain, 1, steps=8) == DONE
    assert digest_line(plain) != digest_line(runs[0])


def test_values_that_decide_no_bits_may_change(loop: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_loop(loop, run, 1) == DONE
    assert run_loop(loop, run, 1, steps=6, keep=2, patience=9) == DONE
    assert overrides(run) == []


def test_an_override_keeps_what_the_loop_itself_has_set(loop: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_loop(loop, run, 1, divide_at=2) == DONE
    words = ["decay=0.5"]
    assert run_loop(loop, run, 1, steps=6, divide_at=2, override=words) == DONE
    assert logged(run, "rate")[3:] == [0.025] * 3
    assert logged(run, "decay") == [0.0] * 4 + [0.5] * 2


def test_an_override_that_the_state_of_a_scheduler_replaces_is_refused(
    loop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_loop(loop, run, 2, scheduled=True) == DONE
    refused = run_loop(loop, run, 2, scheduled=True, steps=6, override=["lr=0.05"])
    assert refused.code == 2 and "--override of lr does not reach scheduler" in refused.text
    assert "base_lrs.0 is 0.1 from the checkpoint, 0.05 as constructed" in refused.text
    assert overrides(run) == []
    assert run_loop(loop, run, 2, scheduled=True, steps=6, override=["decay=0.1"]) == DONE


@pytest.mark.parametrize(
    ("override", "message"),
    [("lr=0.05", "there is no run to override"), ("lrr=0.05", "takes no --lrr")],
)
def test_an_override_of_a_new_run_or_an_unknown_name_is_refused(
    loop: Path, tmp_path: Path, override: str, message: str
) -> None:
    refused = run_loop(loop, tmp_path / "run", 1, override=[override])
    assert refused.code == 2 and message in refused.text


def test_a_worker_that_joins_has_the_overridden_value(loop: Path, tmp_path: Path) -> None:
    healed, whole = tmp_path / "healed", tmp_path / "whole"
    train = ["train", f"{loop}:train", "--workers", "2"]
    words = ["--override", "lr=0.05", "--steps", "60"]
    for run, kill_at in ((healed, "9"), (whole, "-1")):
        assert run_loop(loop, run, 2) == DONE
        env = one_thread(LOCKSTEP_TMP=str(tmp_path), KILL_AT=kill_at)
        done = run_lockstep(*train, "--out", run, *words, env=env)
        assert done.returncode == 0, done.stderr
    joined = [event for event in read_events(healed) if event.get("joined")]
    assert joined, "a worker was replaced in place"
    assert digest_line(healed) == digest_line(whole)
    assert overrides(healed) == [(4, {"lr": "0.05"})]
    assert set(logged(healed, "rate")[4:]) == {0.05}


@pytest.mark.long
def test_launch_of_a_script_compares_the_values_of_its_function(loop: Path, tmp_path: Path) -> None:
    run, report = tmp_path / "run", tmp_path / "report.html"
    assert run_loop(loop, run, 2) == DONE
    env = one_thread(LOCKSTEP_TMP=str(tmp_path))
    words = ["run", "--workers", "2", "--out", run, loop, "--steps", "6"]
    refused = run_lockstep(*words, "--lr", "0.05", env=env)
    assert refused.returncode and "--override lr=0.05" in refused.stderr, refused.stderr
    done = run_lockstep(*words, "--override", "lr=0.05", env=env)
    assert done.returncode == 0, done.stderr
    assert overrides(run) == [(4, {"lr": "0.05"})]
    assert run_lockstep("report", run, "--out", report, env=env).returncode == 0
    page = report.read_text()
    assert '<th scope="row">lr</th><td>0.05</td>' in page
    assert "override" in page
