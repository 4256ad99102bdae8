"""The configuration of a run that starts, resumes or overrides its schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config.resolve import resolve
from lockstep.config.rules import parse_overrides
from lockstep.config.saved_run import format_run, from_json, open_run, to_json, write_run
from lockstep.config.schema import ResolvedRun, ScheduleOverride
from lockstep.errors import CheckpointError, ConfigError
from lockstep.recipes.run import refuse_other_overrides
from lockstep.tasks.optim import learning_rate


def start_run(folder: Path, **flags: str) -> None:
    """Create a run in `folder` with output."""
    write_run(folder, open_run(folder, None, flags, {}))
    (folder / "metrics.jsonl").touch()


def test_a_resumed_run_keeps_its_values_and_refuses_other_bits(tmp_path: Path) -> None:
    started = open_run(tmp_path, None, {"seed": "3", "steps": "10"}, {})
    write_run(tmp_path, started)
    resumed = open_run(tmp_path, None, {"steps": "20", "checkpoint.keep": "9"}, {})
    assert (resumed.run.seed, resumed.run.steps, resumed.run.checkpoint.keep) == (3, 20, 9)
    assert open_run(tmp_path, None, {"seed": "4"}, {}).run.seed == 4, "the run has no output yet"
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds another run: seed was 3, now 4"):
        open_run(tmp_path, None, {"seed": "4"}, {})
    (tmp_path / "run.json").write_text('{"values": ')
    with pytest.raises(CheckpointError, match="is damaged"):
        open_run(tmp_path, None, {}, {})


def test_the_learning_rate_decays_until_the_last_step_unless_configured(tmp_path: Path) -> None:
    assert (
        resolve().run.optim.decay_steps == 300 == resolve().run.steps
        and resolve().origin["optim.decay_steps"] == "as steps"
    )
    longer = open_run(tmp_path, None, {"steps": "3000"}, {}).run
    assert longer.optim.decay_steps == 3000 and learning_rate(
        3000, longer.optim
    ) > 0 == learning_rate(3001, longer.optim)
    assert (
        open_run(
            tmp_path, None, {"steps": "3000", "optim.decay_steps": "2000"}, {}
        ).run.optim.decay_steps
        == 2000
    ), "on purpose"
    file = tmp_path / "run.toml"
    file.write_text("steps = 100\n[optim]\nwarmup_steps = 10\ndecay_steps = 50\n")
    with pytest.raises(
        ConfigError,
        match=r"the learning rate is 0 from step 51 on, and the run has 100 steps\n.*steps=100 from .*run.toml",
    ):
        open_run(tmp_path, file, {}, {})
    assert open_run(tmp_path, file, {"optim.schedule": "constant"}, {}) and open_run(
        tmp_path, file, {"steps": "50"}, {}
    )


def test_more_steps_than_saved_need_a_new_schedule(tmp_path: Path) -> None:
    start_run(tmp_path, steps="100")
    assert open_run(tmp_path, None, {"steps": "90"}, {}).run.optim.decay_steps == 100, (
        "the saved schedule does not change"
    )
    with pytest.raises(
        ConfigError, match=r"the learning rate is 0 from step 101 on, and the run has 200 steps"
    ):
        open_run(tmp_path, None, {"steps": "200"}, {})
    longer = open_run(
        tmp_path,
        None,
        {"steps": "200"},
        {},
        ScheduleOverride(100, parse_overrides(["optim.decay_steps=200"])),
    )
    assert (
        longer.run.optim.decay_steps == 100
        and longer.optim_after(99).decay_steps == 100 < longer.optim_after(100).decay_steps == 200
    )


def test_a_run_with_only_prepared_data_uses_the_schedule_of_the_new_steps(tmp_path: Path) -> None:
    start_run(tmp_path, steps="0")
    assert open_run(tmp_path, None, {"steps": "500"}, {}).run.optim.decay_steps == 500


def test_an_override_takes_effect_from_its_step_on_and_is_not_added_twice(tmp_path: Path) -> None:
    start_run(tmp_path)
    with pytest.raises(ConfigError, match=r"--override optim.learning_rate=0.001"):
        open_run(tmp_path, None, {"optim.learning_rate": "1e-3"}, {})

    def override(step: int, *words: str, rewind: bool = False) -> ResolvedRun:
        resolved = open_run(
            tmp_path, None, {}, {}, ScheduleOverride(step, parse_overrides(words)), rewind=rewind
        )
        write_run(tmp_path, resolved)
        return resolved

    resolved = override(120, "optim.learning_rate=1e-3", "optim.schedule=constant")
    assert resolved.overrides == (
        ScheduleOverride(120, {"optim.learning_rate": 1e-3, "optim.schedule": "constant"}),
    )
    assert [learning_rate(n + 1, resolved.optim_after(n)) == 1e-3 for n in (119, 120, 250)] == [
        False,
        True,
        True,
    ]
    assert resolved.run == resolve().run, "the saved values do not change"
    assert from_json(
        json.loads(json.dumps(to_json(resolved)))
    ) == resolved and "from step 121 on" in format_run(resolved)
    assert (
        override(200, "optim.learning_rate=1e-3")
        == resolved
        == override(100, "optim.learning_rate=0.001")
    ), "the same command again"
    assert open_run(tmp_path, None, {}, {}) == resolved
    assert override(50, "optim.learning_rate=1e-3", rewind=True).overrides == (
        ScheduleOverride(50, {"optim.learning_rate": 1e-3}),
        ScheduleOverride(120, {"optim.schedule": "constant"}),
    )


def test_a_new_run_has_nothing_to_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to override"):
        open_run(
            tmp_path,
            None,
            {},
            {},
            ScheduleOverride(0, parse_overrides(["optim.schedule=constant"])),
        )


def test_a_checkpoint_that_was_trained_with_other_overrides_is_refused() -> None:
    run = replace(
        resolve(),
        overrides=(
            ScheduleOverride(50, {"optim.schedule": "constant"}),
            ScheduleOverride(80, {"optim.learning_rate": 1e-3}),
        ),
    )
    facts = {"run": json.loads(json.dumps(to_json(replace(run, overrides=run.overrides[:1]))))}
    for step in (60, 80):
        refuse_other_overrides(facts, run, step)
    refuse_other_overrides({}, run, 0)
    with pytest.raises(
        CheckpointError, match="the checkpoint of step 90 was trained with the overrides"
    ):
        refuse_other_overrides(facts, run, 90)
    with pytest.raises(CheckpointError, match="the run has \\[\\]"):
        refuse_other_overrides(facts, resolve(), 60)
