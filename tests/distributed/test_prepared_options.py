"""session.prepare(precision, compile, activation_checkpoint): one digest on any workers and layout,
killed and resumed; and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.fork_loop import LoopResult, run_loop
from torch import nn

from lockstep.checkpoint.commands import digest_line
from lockstep.errors import UsageError
from lockstep.record.metrics import iter_steps
from lockstep.training.model_options import in_float32, prepare_blocks, resolve_precision

LOOP = Path(__file__).parents[1] / "support" / "loops" / "prepared.py"
BF16, FULL, SELECTIVE = (
    {"precision": "bf16"},
    {"activation_checkpoint": "full"},
    {"activation_checkpoint": "selective"},
)


def train(folder: Path, workers: int, **options: Any) -> str:
    result = run_loop(LOOP, folder, workers, **options)
    assert result == LoopResult(0, ""), result.text
    return digest_line(folder)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(BF16, marks=pytest.mark.long),
        FULL | BF16,
        pytest.param(SELECTIVE, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_one_digest_in_all_layouts_killed_and_resumed(
    tmp_path: Path, options: dict[str, str]
) -> None:
    alone = train(tmp_path / "1", 1, **options)
    assert train(tmp_path / "3", 3, **options) == alone
    assert train(tmp_path / "shards", 2, shard=2, **options) == alone
    assert run_loop(LOOP, tmp_path / "killed", 2, kill_in=3, **options).code, "it was killed"
    assert train(tmp_path / "killed", 3, **options) == alone
    scores = [
        [line["score"] for line in iter_steps(tmp_path / name / "metrics.jsonl")]
        for name in ("1", "3", "shards")
    ]
    assert scores[0] == scores[1] == scores[2]


def test_checkpointed_activations_have_the_bits_of_kept_ones(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", 1)
    assert train(tmp_path / "full", 1, **FULL) == plain
    assert train(tmp_path / "selective", 2, **SELECTIVE) == plain
    assert train(tmp_path / "bf16", 1, **BF16) != plain


def test_a_pipeline_has_the_bits_of_one_worker_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(tmp_path / "1", 1, **BF16, **FULL)
    monkeypatch.setenv("LOCKSTEP_LAYOUT_PIPELINE", "2")
    assert train(tmp_path / "stages", 2, **BF16, **FULL) == alone


@pytest.mark.long
def test_compiled_blocks_have_one_digest_in_replicas_and_shards(tmp_path: Path) -> None:
    alone = train(tmp_path / "1", 1, compile=True)
    assert train(tmp_path / "2", 2, compile=True) == alone
    assert train(tmp_path / "shards", 2, shard=2, compile=True) == alone


def test_another_precision_at_a_resume_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1, **BF16, steps=2)
    result = run_loop(LOOP, tmp_path, 1, precision="fp32")
    assert result.code == 3 and "precision was bf16, is fp32" in result.text, result.text


def test_what_cannot_be_prepared_is_refused() -> None:
    changing = nn.Sequential(*[nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2)])
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (nn.Linear(2, 2), {"compile": True}, "Linear has no repeated blocks"),
        (changing, FULL, "would update them twice: 0, 1"),
        (changing, {"activation_checkpoint": "some"}, "activation_checkpoint='some'"),
    ]
    for model, options, message in cases:
        with pytest.raises(UsageError, match=message):
            prepare_blocks(
                model, None, **({"compile": False, "activation_checkpoint": "none"} | options)
            )
    with pytest.raises(UsageError, match="precision='fp16'"):
        resolve_precision("fp16", torch.device("cpu"))  # type: ignore[arg-type]


class Counting(nn.Module):
    """A block with a count of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("passes", torch.zeros(()))


def test_blocks_that_cannot_be_computed_twice_are_refused() -> None:
    counting = nn.Sequential(Counting(), Counting())
    with pytest.raises(UsageError, match="would update them twice: 0, 1"):
        prepare_blocks(
            counting, None, compile=False, activation_checkpoint="full", counted={"*.passes": 1.0}
        )
    patched = nn.Sequential(Counting(), Counting())
    patched[1].forward = lambda x: 7 * x
    with pytest.raises(UsageError, match=r"whose forward\(\) was replaced .*: 1"):
        prepare_blocks(patched, None, compile=False, activation_checkpoint="full")


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_that_torch_does_not_repeat_are_refused(draw: Callable[[], float]) -> None:
    class Drawing(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x * draw())
            return result

    model = nn.Sequential(Drawing(), Drawing())
    prepare_blocks(model, None, compile=False, activation_checkpoint="full")
    with pytest.raises(UsageError, match="drew numbers from NumPy's or Python's generator"):
        model(torch.ones(1, 2))


class Pair(NamedTuple):
    logits: torch.Tensor
    name: str


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    count: int


def test_outputs_become_float32_in_their_containers() -> None:
    half, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)
    given = {"a": half, "b": [half, (whole, None)], "c": Pair(half, "x"), "d": Output(half, 2)}
    output = in_float32(given)
    assert output["a"].dtype == output["b"][0].dtype == torch.float32
    assert output["b"][1][0] is whole and output["b"][1][1] is None
    assert isinstance(output["c"], Pair) and output["c"].logits.dtype == torch.float32
    assert isinstance(output["d"], Output) and output["d"].logits.dtype == torch.float32
    assert given["a"] is half, "nothing is changed in place"


def test_outputs_of_transformers_become_float32() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given = outputs.CausalLMOutput(logits=torch.ones(2, dtype=torch.bfloat16))
    output = in_float32(given)
    assert type(output) is type(given) and output.logits.dtype == torch.float32
    assert output["logits"] is output.logits and given.logits.dtype == torch.bfloat16
