"""A user's own model of peft in a Session: one sha256 in replicas and shards, and a folder of peft."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.launching import lockstep_command, run_command

from lockstep.checkpoint.commands import digest_line
from lockstep.cli.main import main

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # in peft
SCRIPT = Path(__file__).parents[1] / "support" / "loops" / "peft_model.py"


def run(folder: Path, workers: int, shards: int) -> None:
    options = ["--out", str(folder), "--workers", str(workers), "--layout.shard", str(shards)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_TMP": str(folder.parent)}
    command = lockstep_command("run", *options, str(SCRIPT))
    result = run_command(command, env=environ)
    assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_an_own_model_of_peft_has_one_digest_and_its_adapters_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    monkeypatch.syspath_prepend(SCRIPT.parent)
    peft_model = importlib.import_module("peft_model")
    for name, workers, shards in (
        ("alone", 1, 1),
        ("replicas", 2, 1),
        ("shards", 2, 2),
        ("both", 4, 2),
    ):
        (tmp_path / name).mkdir()
        if name == "both":
            (tmp_path / name / "disturb").write_text(json.dumps({"kill": 8}))
        run(tmp_path / name, workers, shards)
    assert (
        len({digest_line(tmp_path / name) for name in ("alone", "replicas", "shards", "both")}) == 1
    )
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(tmp_path / "shards"),
                "--out",
                str(tmp_path / "weights.safetensors"),
            ]
        )
        == 0
    )
    weights = load_file(tmp_path / "weights.safetensors")
    start = peft_model.make_model()
    for name, parameter in start.named_parameters():
        assert torch.equal(weights[name], parameter) != parameter.requires_grad, (
            f"{name}: frozen weights alone are unchanged"
        )
    start.save_pretrained(tmp_path / "adapter", state_dict=weights)
    start.load_state_dict(weights, strict=False)
    loaded = PeftModel.from_pretrained(peft_model.make_model().unload(), tmp_path / "adapter")
    ids = torch.arange(12)[None]
    assert torch.equal(loaded.eval()(ids).logits, start.eval()(ids).logits)
