"""Each script of examples/gallery has one digest on any number of replicas and shards, killed and
resumed, or killed and healed.

With one micro-batch in a step it equals its plain loop, given the same samples and random numbers.
Where the loop draws no random numbers, the plain loop equals six micro-batches up to rounding.
The short part has one run of each script that is killed with three replicas and resumed with two
replicas of two shards. The whole table is long (LOCKSTEP_CHAOS=1; `-rP` prints it).
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.fork_loop import LoopResult, run_loop
from support.launching import ROOT, one_thread, run_lockstep
from torch import Tensor

from lockstep.checkpoint.commands import digest_line, export
from lockstep.checkpoint.folder import committed_steps
from lockstep.data.order import UniformOrder, splitmix64
from lockstep.elastic.fault_injection import DRILL_VARIABLE, request_fault
from lockstep.record import events
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.worker_env import state_folder
from lockstep.training.loader import KeyedBatches

GALLERY = ROOT / "examples" / "gallery"
STEPS, KILLED_IN, CPU = 8, 6, torch.device("cpu")
# The data set of train, samples of a step, and by micro-batches of a step the largest difference to
# the plain loop. Some draw random numbers by micro-batch; `count` divides after the backward pass;
# Muon rounds to bfloat16.
SCRIPTS: dict[str, tuple[str, int, dict[int, float]]] = {
    "image_classifier": ("Squares", 24, {1: 0.0}),
    "gan": ("make_circle", 48, {1: 0.0}),
    "gpt": ("Sorting", 24, {1: 0.0}),
    "diffusion": ("make_spiral", 48, {1: 0.0}),
    "dp_sgd": ("make_rows", 48, {1: 0.0}),
    "contrastive": ("make_pairs", 48, {1: 0.0, 6: 1e-6}),
    "muon": ("make_rows", 48, {1: 0.0, 6: 0.01}),
    "lines_of_text": ("Lines", 24, {1: 0.0, 6: 2e-6}),
    "graphs": ("Rings", 24, {1: 1e-6, 6: 1e-6}),
    "peft_adapters": ("Counting", 12, {1: 0.0}),
}
LAYOUTS = {
    "1 replica": (1, 1),
    "2 replicas": (2, 1),
    "3 replicas": (3, 1),
    "4 replicas": (4, 1),
    "shard 2": (2, 2),
    "2 x 2": (4, 2),
}  # (workers, shard)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # in peft


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> str:
    if request.param == "peft_adapters":
        pytest.importorskip("peft")
    return str(request.param)


def module_of(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gallery_{script}", GALLERY / f"{script}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(script: str, folder: Path, workers: int, shard: int = 1, **options: Any) -> LoopResult:
    flags = {"steps": STEPS, "save_every": 2} | options
    return run_loop(GALLERY / f"{script}.py", folder, workers, shard=shard, **flags)


def digest_of_killed_and_resumed(script: str, folder: Path) -> str:
    """Kill three replicas and resume in another layout."""
    assert train(script, folder, 3, kill_in=KILLED_IN).code, "it was killed"
    assert 0 < committed_steps(folder / "checkpoints")[-1] < KILLED_IN
    assert train(script, folder, *LAYOUTS["2 x 2"]) == LoopResult(0, "")
    return digest_line(folder)


def digest_of_killed_and_healed(script: str, folder: Path) -> str:
    """Kill one of two replicas under an agent, which replaces it while the other keeps its state."""
    request_fault(state_folder(folder, socket.gethostname()), 1, "kill", at="forward", step=3)
    words = [
        "launch",
        "--out",
        folder,
        "--workers",
        2,
        "--min",
        2,
        f"{GALLERY / script}.py:train",
        "--steps",
        STEPS,
    ]
    result = run_lockstep(*words, env=one_thread(**{DRILL_VARIABLE: "1"}))
    assert result.returncode == 0, result.stderr
    assert any(
        event["event"] == "regrouped" and event["joined"] for event in events.read_events(folder)
    ), "replaced in place"
    return digest_line(folder)


def test_weights_are_those_of_the_plain_loop_and_one_digest_is(script: str, tmp_path: Path) -> None:
    for micro_batches in (6, 1):
        assert train(
            script, tmp_path / str(micro_batches), 1, micro_batches=micro_batches
        ) == LoopResult(0, "")
        refuse_difference_to_the_plain_loop(script, tmp_path / str(micro_batches), micro_batches)
    assert digest_of_killed_and_resumed(script, tmp_path / "resumed") == digest_line(tmp_path / "6")


@pytest.mark.parametrize(
    "healed", ["image_classifier", pytest.param("diffusion", marks=pytest.mark.long)]
)
def test_one_digest_of_killed_and_healed(
    healed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    assert train(healed, tmp_path / "one", 1) == LoopResult(0, "")
    assert digest_of_killed_and_healed(healed, tmp_path / "healed") == digest_line(tmp_path / "one")


@pytest.mark.long
def test_one_digest_in_the_whole_table(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    digests: dict[str, str] = {}
    for name, (workers, shard) in LAYOUTS.items():
        result = train(script, tmp_path / name, workers, shard)
        assert result == LoopResult(0, ""), name
        digests[name] = digest_line(tmp_path / name)
    digests["killed and healed"] = digest_of_killed_and_healed(script, tmp_path / "healed")
    digests["killed and resumed"] = digest_of_killed_and_resumed(script, tmp_path / "resumed")
    print(
        f"\n{script}: "
        + ", ".join(f"{name} {digest.split()[-1][:8]}" for name, digest in digests.items())
    )
    assert len(set(digests.values())) == 1, digests


def refuse_difference_to_the_plain_loop(script: str, folder: Path, micro_batches: int) -> None:
    tolerance = SCRIPTS[script][2].get(micro_batches)
    if tolerance is None or torch.cuda.is_available():  # the plain loops train on the CPU
        return
    module = module_of(script)
    plain = module.plain(STEPS, batches_of(module, script, micro_batches)).state_dict()
    weights = weights_of(folder)
    assert weights.keys() == plain.keys()
    differences = {
        name: float((weights[name] - tensor).abs().max()) for name, tensor in plain.items()
    }
    print(script, micro_batches, max(differences.values()))
    assert max(differences.values()) <= tolerance, differences


def batches_of(module: ModuleType, script: str, micro_batches: int) -> Iterator[Any]:
    """Yield the samples of each step, and seed the generators as in its only micro-batch."""
    name, batch_size, _ = SCRIPTS[script]
    dataset = module.Lines(module.write_file()) if name == "Lines" else getattr(module, name)()
    order = UniformOrder(len(dataset), batch_size, micro_batches)
    merge = module.merge if script == "graphs" else torch.utils.data.default_collate
    for step in range(STEPS):
        if micro_batches > 1:
            yield merge(
                [dataset[i] for k in range(micro_batches) for i in order.ids(step, k).tolist()]
            )
        else:
            batch = KeyedBatches(dataset, order, merge)[step, 0]
            seed_generators(splitmix64(0, step, 0) >> 1, CPU)
            yield batch


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the model's weights and buffers in the newest checkpoint."""
    export(folder, None, folder / "weights.safetensors")
    return load_file(folder / "weights.safetensors")


def test_adapters_of_a_run_load_in_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module = module_of("peft_adapters")
    assert train("peft_adapters", tmp_path, 1, steps=2) == LoopResult(0, "")
    trained = weights_of(tmp_path)
    module.save_adapters(str(tmp_path / "weights.safetensors"), str(tmp_path / "adapters"))
    loaded = peft.PeftModel.from_pretrained(
        module.make_model().unload(), tmp_path / "adapters"
    ).state_dict()
    assert loaded.keys() == trained.keys() and all(
        torch.equal(loaded[name], tensor) for name, tensor in trained.items()
    )
    assert any(tensor.any() for name, tensor in loaded.items() if "lora_B" in name)
