"""Write the run folder of a training that lost a worker, with the writers that a run uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lockstep.config.resolve import resolve
from lockstep.config.saved_run import write_run
from lockstep.record.events import append_event
from lockstep.record.metrics import MetricsFile, append_json, encode_line

START = datetime(2026, 11, 1, 12, tzinfo=UTC)
SPIKE_STEP = 37


def metrics_of(step: int) -> dict[str, Any]:
    """Return the metrics of a step, as the loop of the recipes records them; the norm has a spike."""
    return {
        **{
            "loss": 8.0 / (1 + step / 50) + 1 / step,
            "norm": 900.0 if step == SPIKE_STEP else 1 + 0.1 * (step % 5),
        },
        **{
            "lr": 1e-3,
            "workers": 3,
            "tokens": 4096,
            "seconds": 0.5,
            "data_seconds": 0.05,
            "communication_seconds": 0.1,
        },
        **{
            "saving_seconds": 0.0,
            "overhead_seconds": 0.0,
            "tokens_per_second": 8192.0,
            "data_wait": 0.1,
        },
        **{"exposed_communication": 0.2, "memory_bytes": 2**30, "generation": 1},
    }


def write_events(run: Path, steps: int) -> None:
    """Write the events of three generations: worker a/0 is killed in the middle, and replaced."""
    ids = ["a/0/x1", "a/1/x2", "b/0/x3"]
    half, lost = steps // 2, ids[1:]
    events: list[tuple[float, str, dict[str, Any]]] = [
        (0.0, "began", {"generation": 1, "step": 0, "steps": steps, "workers": ids}),
        (
            10.0,
            "worker ended",
            {"host": "a", "slot": 0, "pid": 7, "why": "killed by SIGKILL; restarting now"},
        ),
        (
            10.5,
            "regrouped",
            {"generation": 2, "step": half, "why": "a/0: exited", "workers": lost, "joined": []},
        ),
        (
            14.0,
            "regrouped",
            {
                "generation": 3,
                "step": half + 8,
                "why": "members change",
                "workers": [*lost, "a/0/x4"],
                "joined": [2],
            },
        ),
        (20.0, "saved", {"step": steps, "seconds": 0.1, "generation": 3}),
        (
            21.0,
            "goodput",
            {
                "goodput": 0.7,
                "wall_s": 21.0,
                "training_s": 14.7,
                "communication_s": 3.1,
                "lost_s": 0.2,
                "starting_s": 3.0,
            },
        ),
        (22.0, "worker ended", {"host": "b", "slot": 0, "pid": 9, "why": "exited with code 0"}),
    ]
    for seconds, event, facts in events:
        time = (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
        append_json(run / "events.jsonl", {"time": time, "event": event, **facts})


def write_run_folder(run: Path, steps: int = 60, **values: str) -> Path:
    """Write the run with `steps` steps; values: as for `lockstep train --section.key VALUE`."""
    metrics = MetricsFile(run / "metrics.jsonl", 0)
    for step in range(1, steps + 1):
        metrics.log(step, metrics_of(step))
    metrics.close()
    write_events(run, steps)
    write_run(run, resolve(None, {"steps": str(steps), **values}))
    append_json(
        run / "evaluations.jsonl", {"step": steps, "split": "test", "loss": 1.25, "bleu": 31.5}
    )
    (run / "samples.json").write_text(
        json.dumps({"step": steps, "lines": ["", "  en  Tuesday <b>", "  it  martedì"]})
    )
    return run


def append_note(run: Path, why: str) -> None:
    append_event(run, "worker ended", host="a", slot=1, pid=8, why=why)


def write_long_metrics(
    path: Path, steps: int, more: Callable[[int], dict[str, Any]] = lambda step: {}
) -> None:
    """Write the metrics of many steps at once, with values that the user's loop logs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.writelines(
            encode_line({"step": step, **metrics_of(step), **more(step)})
            for step in range(1, steps + 1)
        )


def write_many_generations(run: Path, generations: int, workers: int) -> None:
    """Write the events of a run that loses and replaces a worker every ten seconds."""
    with open(run / "events.jsonl", "wb") as file:
        for number in range(1, generations + 1):
            time = (START + timedelta(seconds=10 * number)).isoformat(timespec="milliseconds")
            ids = [
                f"host-{i // 8}/{i % 8}/{number if i == number % workers else 0}"
                for i in range(workers)
            ]
            facts = {
                "generation": number,
                "step": 20 * number,
                "why": f"host-0/{number % 8}: exited",
                "workers": ids,
            }
            file.write(
                encode_line(
                    {"time": time, "event": "regrouped" if number > 1 else "began", **facts}
                )
            )
