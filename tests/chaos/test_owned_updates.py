"""A worker dies while the shards of a replica exchange an update; the averaged weights survive."""

from __future__ import annotations

from pathlib import Path

from support.fault_matrix import StartTraining
from support.hosts import undisturbed

STEPS = 16
VALUES: dict[str, object] = {
    "optim__kind": "muon",
    "optim__ema_decay": 0.9,
    "checkpoint__every_steps": 5,
}


def test_a_shard_killed_during_the_exchange_of_an_update_keeps_the_bits(
    start_training: StartTraining, tmp_path: Path
) -> None:
    (tmp_path / "truth").mkdir()
    truth = undisturbed(tmp_path / "truth", STEPS, **VALUES)
    training = start_training(workers=4, steps=STEPS, values={**VALUES, "layout__shard": 2})
    training.request_fault(3, "kill", at="updating", step=7)
    training.wait(lambda: training.fault_taken(3), what="the update of step 7")
    training.assert_same_bits(truth)
    (regrouped, *_) = training.events("regrouped")
    assert 7 <= regrouped["step"] <= 8, "the other replica continued in place"
    assert "exchanged an update" in training.report() or training.wrote("exchanged an update"), (
        training.report()
    )
