"""`lockstep replay`, `diff` and `why` on runs of real workers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.launching import run_command, run_lockstep

from lockstep.record.metrics import iter_steps

DISTURBED = Path(__file__).parents[1] / "support" / "loops" / "session.py"
GPT = Path(__file__).parents[2] / "examples" / "gallery" / "gpt.py"
EQUAL = "losses and digests equal the record"


@pytest.fixture(autouse=True, scope="module")
def separate_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_TMP", str(tmp_path_factory.mktemp("state")))
        yield


def passed(*words: object, **options: Any) -> str:
    result = run_lockstep(*words, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


def differs(*words: object) -> str:
    result = run_lockstep(*words)
    assert result.returncode == 1, result.stdout + result.stderr
    return str(result.stdout)


def refused(*words: object) -> str:
    result = run_lockstep(*words)
    assert result.returncode == 2, result.stdout + result.stderr
    return str(result.stderr)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three workers, one of which is killed, that stops and continues with two."""
    folder = tmp_path_factory.mktemp("disturbed") / "run"
    folder.mkdir()
    (folder / "disturb").write_text(json.dumps({"kill": 13, "stop": 25}))
    words = ("train", f"{DISTURBED}:train", "--out", folder)
    stopped = run_lockstep(*words, "--workers", "3")
    assert stopped.returncode == 75, stopped.stderr
    passed(*words, "--workers", "2")
    return folder


def gpt_run(folder: Path, text: str = "", changed: str = "", **flags: object) -> Path:
    """Train the example of a small GPT in `folder` on one worker, with `text` in it changed."""
    source = GPT.read_text()
    assert text in source
    folder.mkdir()
    (folder / "gpt.py").write_text(source.replace(text, changed))
    words = [f"--{name}={value}" for name, value in {"steps": 6, "save_every": 2, **flags}.items()]
    out = folder / "run"
    passed("run", "--workers", "1", "--out", out, "gpt.py", "--", *words, cwd=folder)
    return out


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_run(tmp_path_factory.mktemp("gpt") / "base")


def test_each_step_of_a_killed_stopped_and_resumed_run_can_be_replayed(disturbed: Path) -> None:
    before = files_of(disturbed)
    for step, first in ((5, "the start of the run"), (35, "the checkpoint of step 30"), (40, "30")):
        assert re.search(f"{first}.*: {EQUAL}", passed("replay", disturbed, "--step", step))
    assert files_of(disturbed) == before, "the run folder is left as it was"


def test_the_record_has_losses_of_all_micro_batches_and_a_digest_in_200_bytes(
    disturbed: Path,
) -> None:
    for line in iter_steps(disturbed / "metrics.jsonl"):
        assert len(line["losses"]) == 6 and abs(sum(line["losses"]) - line["loss"]) < 1e-6
        record = {name: line[name] for name in ("losses", "digest")}
        assert len(json.dumps(record)) + 2 * 20 <= 200  # with two more losses


def test_a_changed_loop_is_named_with_its_first_step(gpt: Path, tmp_path: Path) -> None:
    script = gpt.parent / "gpt.py"
    source = script.read_text()
    try:
        script.write_text(source.replace("clip_grad_norm_(1.0)", "clip_grad_norm_(0.1)"))
        assert "step 6: it begins with other weights" in differs("replay", gpt, "--step", 6)
        script.unlink()
        missing = refused("replay", gpt, "--step", 6)
        assert "the script gpt.py is missing" in missing and "put it back" in missing
    finally:
        script.write_text(source)


def test_a_micro_batch_is_dumped(gpt: Path, tmp_path: Path) -> None:
    words = ("--step", 5, "--micro-batch", 2, "--dump", tmp_path / "dump")
    assert EQUAL in passed("replay", gpt, *words)
    tensors = load_file(tmp_path / "dump" / "micro-batch-2.safetensors")
    kinds = {name.split(" ", 1)[1]: tensor for name, tensor in tensors.items()}
    assert kinds["blocks.1.mlp.2 output"].shape == kinds["blocks.1.mlp.2 gradient"].shape
    assert kinds["blocks.1.mlp.2 input"].shape == (4, 11, 128)
    weight = kinds["blocks.1.mlp.2.weight weight gradient"]
    # The gradient of a linear layer follows from its input and the gradient of its output.
    gradient = kinds["blocks.1.mlp.2 gradient"].flatten(0, 1)
    inputs = kinds["blocks.1.mlp.2 input"].flatten(0, 1)
    assert ((gradient.T @ inputs - weight).abs().max() / weight.abs().max()) < 1e-5


def test_pdb_stops_in_the_body_of_the_step(gpt: Path) -> None:
    result = run_lockstep(
        "replay", gpt, "--step", 5, "--debug", "--micro-batch", 1, input="p step, ids.shape\nc\n"
    )
    assert "session.backward(model(ids, targets))" in result.stdout
    assert "(4, torch.Size([4, 11]))" in result.stdout and EQUAL in result.stdout


def test_a_step_out_of_reach_is_refused(gpt: Path, tmp_path: Path) -> None:
    assert "the run has no step 7" in refused("replay", gpt, "--step", 7)
    copy = tmp_path / "copy"
    shutil.copytree(gpt, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000002")
    message = refused("replay", copy, "--step", 4)
    assert "no checkpoint before step 4 is left" in message and "--from-start" in message
    assert EQUAL in passed("replay", copy, "--step", 4, "--from-start")


CHANGES = {
    "model": ("nn.GELU()", "nn.GELU('tanh')", "step 1, micro-batch 0: blocks.0.mlp.1 output"),
    "optimizer": ("lr=3e-3", "lr=3.001e-3", "step 1: the update of tokens.weight"),
    "data": ("i, 1:].clone()", "i, 1:].clone() % 5", "step 1, micro-batch 0: the data (batch 1)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_place_where_two_runs_part_is_named(change: str, gpt: Path, tmp_path: Path) -> None:
    text, changed, place = CHANGES[change]
    other = gpt_run(tmp_path / change, text, changed)
    shown = differs("diff", gpt, other)
    assert f"they part in {place}" in shown and "elements differ" in shown
    assert "code.own loop: gpt.py" in shown


def test_equal_runs_are_equal(gpt: Path, tmp_path: Path) -> None:
    other = gpt_run(tmp_path / "other", steps=4)
    assert "equal up to step 4" in passed("diff", gpt, other)


BAD_SAMPLE = """
class Bad(Sorting):
    def __init__(self) -> None:
        super().__init__()
        self.rows[117, LENGTH // 2 :] = self.rows[117, LENGTH // 2 :].flip(0)
"""


def test_a_bad_sample_is_named(tmp_path: Path) -> None:
    run = gpt_run(
        tmp_path / "bad",
        "def make_optimizer",
        f"{BAD_SAMPLE.strip()}\n\n\nSorting = Bad\n\n\ndef make_optimizer",
        steps=60,
        save_every=20,
    )
    order = json.loads((run / "checkpoints" / "step-00000060" / "facts.json").read_text())
    assert order["fingerprints"]["loader 0"].startswith("240 samples")
    step = next(step for step in range(41, 61) if 117 in samples_of(step - 1))
    shown = passed("why", run, "--step", step)
    assert re.search(r"highest losses.*\n  samples 117, in micro-batch", shown), shown


def samples_of(step: int) -> list[int]:
    from lockstep.data.order import UniformOrder

    order = UniformOrder(240, batch_size=24, micro_batches=6, seed=0)
    return [i for k in range(6) for i in order.ids(step, k).tolist()]


def test_the_commands_refuse_what_is_no_run(tmp_path: Path) -> None:
    for words in (("replay", tmp_path, "--step", 1), ("why", tmp_path, "--step", 1)):
        assert "is not a run" in refused(*words)
    assert "is not a run" in refused("diff", tmp_path, tmp_path)
    assert run_command(["true"]).returncode == 0
