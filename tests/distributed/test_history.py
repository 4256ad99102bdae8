"""`lockstep replay`, `diff` and `why` on runs of real workers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from safetensors.torch import load_file
from support.launching import run_command, run_lockstep

from lockstep.data.order import UniformOrder
from lockstep.record.metrics import append_json, iter_steps

DISTURBED = Path(__file__).parents[1] / "support" / "loops" / "session.py"
GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
EQUAL = "digests equal the record"


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


def example_run(
    folder: Path,
    changes: Mapping[str, str] = MappingProxyType({}),
    *options: object,
    name: str = "gpt.py",
    **flags: object,
) -> Path:
    """Train an example in `folder`, on one worker, with texts in it changed."""
    source = (GALLERY / name).read_text()
    for text, changed in changes.items():
        assert text in source
        source = source.replace(text, changed)
    folder.mkdir()
    (folder / name).write_text(source)
    words = [f"--{flag}={value}" for flag, value in {"steps": 6, "save_every": 2, **flags}.items()]
    workers = options or ("--workers", "1")
    out = folder / "run"
    passed("run", *workers, "--out", out, name, "--", *words, cwd=folder)
    return out


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_run(tmp_path_factory.mktemp("gpt") / "base", {}, "--workers", "2")


def test_each_step_of_a_killed_stopped_and_resumed_run_can_be_replayed(disturbed: Path) -> None:
    before = files_of(disturbed)
    starts = {5: "the start of the run", 35: "the checkpoint of step 30", 40: "30"}
    for step, first in starts.items():
        count = 5 if step < 10 else step - 30
        said = passed("replay", disturbed, "--step", step)
        assert f"{first}: all losses and {count} {EQUAL}" in said
    assert files_of(disturbed) == before, "the run folder is left as it was"


def test_a_disturbed_run_is_compared_and_asked(disturbed: Path, tmp_path: Path) -> None:
    quiet = tmp_path / "quiet"
    passed("train", f"{DISTURBED}:train", "--out", quiet, "--workers", "1", "--steps=36")
    assert "equal up to step 36" in passed("diff", disturbed, quiet)
    assert "highest losses" in passed("why", disturbed, "--step", 33)


def test_the_record_has_losses_of_all_micro_batches_and_a_digest_in_200_bytes(
    disturbed: Path,
) -> None:
    for line in iter_steps(disturbed / "metrics.jsonl"):
        assert len(line["digest"]) == 16
        assert len(line["losses"]) == 6 and abs(sum(line["losses"]) - line["loss"]) < 1e-6
        record = {name: line[name] for name in ("losses", "digest")}
        assert len(json.dumps(record)) + 2 * 20 <= 200  # with two more losses


def test_a_changed_loop_is_named_with_its_first_step(gpt: Path, tmp_path: Path) -> None:
    script = gpt.parent / "gpt.py"
    source = script.read_text()
    try:
        script.write_text(source.replace("clip_grad_norm_(1.0)", "clip_grad_norm_(0.1)"))
        shown = differs("replay", gpt, "--step", 6)
        assert "step 6: other weights before it" in shown and "own loop was gpt.py" in shown
        script.unlink()
        missing = refused("replay", gpt, "--step", 6)
        assert "the script gpt.py is missing" in missing and "put it back" in missing
    finally:
        script.write_text(source)


def test_changed_data_is_told_from_changed_code(tmp_path: Path) -> None:
    modulus = tmp_path / "modulus"
    modulus.write_text("4")
    read = f"i, 1:].clone() % int(open({str(modulus)!r}).read())"
    run = example_run(tmp_path / "run", {"i, 1:].clone()": read})
    assert "all losses" in passed("replay", run, "--step", 5)
    modulus.write_text("3")
    shown = differs("replay", run, "--step", 5)
    assert "step 5: loss of micro-batch 0" in shown
    assert "so a file that the loop reads has changed" in shown and "other bits" not in shown


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


def test_pdb_stops_in_the_loop_of_a_recipe(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ("--data.pairs", 500, "--data.held_out", 50, "--tokenizer.vocab_size", 300)
    words = ("--workers", 1, "--steps", 2, "--evaluate.at_end", 0, "--model.dim", 32)
    passed("train", "--out", run, *small, *words)
    result = run_lockstep("replay", run, "--step", 2, "--debug", input="p step, batch.count\nc\n")
    assert "> " in result.stdout and "recipes/translate.py" in result.stdout
    assert "(1, " in result.stdout and EQUAL in result.stdout


def test_a_step_out_of_reach_is_refused(gpt: Path, tmp_path: Path) -> None:
    assert "the run has no step 7" in refused("replay", gpt, "--step", 7)
    number = refused("replay", gpt, "--step", 5, "--micro-batch", 6, "--dump", tmp_path / "dump")
    assert "step 5 has no micro-batch 6" in number and not (tmp_path / "dump").exists()
    copy = tmp_path / "copy"
    shutil.copytree(gpt, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000002")
    message = refused("replay", copy, "--step", 4)
    assert "no checkpoint before step 4 is left" in message and "--from-start" in message
    assert EQUAL in passed("replay", copy, "--step", 4, "--from-start")


CHANGES = {
    "model": ("nn.GELU()", "nn.GELU('tanh')", "step 1, micro-batch 0: blocks.0.mlp.1 output"),
    "optimizer": ("lr=3e-3", "lr=3.001e-3", "step 1: the update of tokens.weight"),
    "data": ("i, 1:].clone()", "i, 1:].clone() % 5", "step 1, micro-batch 0: the data: (batch) 1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_place_where_two_runs_part_is_named(change: str, gpt: Path, tmp_path: Path) -> None:
    text, changed, place = CHANGES[change]
    other = example_run(tmp_path / change, {text: changed})
    shown = differs("diff", gpt, other)
    assert f"they part in {place}" in shown and "elements differ" in shown
    assert "own loop was gpt.py" in shown
    assert ("optimizer: lr was 0.003, is 0.003001" in shown) == (change == "optimizer")


def test_equal_runs_are_equal(gpt: Path, tmp_path: Path) -> None:
    other = example_run(tmp_path / "other", steps=4)
    assert "equal up to step 4" in passed("diff", gpt, other)


def test_losses_of_a_run_in_shards_are_replayed_by_one_process(tmp_path: Path) -> None:
    run = example_run(tmp_path / "shards", {}, "--workers", "2", "--layout.shard", "2")
    assert "all losses and 0 digests equal" in passed("replay", run, "--step", 5)


def test_a_run_that_rolled_back_skips_the_same_micro_batch_again(tmp_path: Path) -> None:
    bad = "spiral = make_spiral()\n        spiral.tensors[0][7] = torch.nan\n"
    changes = {
        "save_every=save_every)": "save_every=save_every, on_divergence='rollback')",
        "loader = session.loader(make_spiral(),": f"{bad}        loader = session.loader(spiral,",
    }
    run = example_run(tmp_path / "bad", changes, "--workers", "2", name="diffusion.py", steps=6)
    lines = list(iter_steps(run / "metrics.jsonl"))
    skipped = [line["step"] for line in lines if None in line["losses"]]
    assert skipped and all(line["losses"].count(None) < 2 for line in lines)
    after = min(6, skipped[-1] + 1)
    assert EQUAL in passed("replay", run, "--step", after, "--from-start")
    alone = example_run(tmp_path / "alone", changes, name="diffusion.py", steps=6)
    assert "equal up to step 6" in passed("diff", run, alone)
    shown = passed("why", run, "--step", skipped[-1], "--from-start")
    assert "norm nan" in shown and re.search("highest.*\n  samples 7, .*: nan", shown), shown


def test_the_step_that_has_ended_a_run_is_asked(tmp_path: Path) -> None:
    bad = "spiral = make_spiral()\n        spiral.tensors[0][7] = torch.nan\n"
    folder = tmp_path / "bad"
    folder.mkdir()
    text = (GALLERY / "diffusion.py").read_text()
    loader = "loader = session.loader(make_spiral(),"
    assert loader in text
    script = folder / "diffusion.py"
    script.write_text(text.replace(loader, f"{bad}        loader = session.loader(spiral,"))
    run = folder / "run"
    ended = run_lockstep("run", "--workers", "2", "--out", run, script, "--", "--steps=9")
    assert ended.returncode == 4, ended.stderr
    last = max((line["step"] for line in iter_steps(run / "metrics.jsonl")), default=0)
    shown = passed("why", run, "--step", last + 1)
    assert f"step {last + 1}: not committed" in shown
    assert re.search("highest.*\n  samples 7, .*: nan", shown), shown
    assert f"the run has no step {last + 1}" in refused("replay", run, "--step", last + 1)


def test_runs_that_differ_in_buffers_alone_are_not_equal(tmp_path: Path) -> None:
    name = "image_classifier.py"
    change = {"nn.BatchNorm2d(8)": "nn.BatchNorm2d(8, momentum=0.2)"}
    runs = [example_run(tmp_path / "a", name=name), example_run(tmp_path / "b", change, name=name)]
    shown = differs("diff", *runs)
    assert "equal up to step 6" in shown and "the checkpoints differ: step 6 sha256" in shown


BAD_SAMPLE = """
class Bad(Sorting):
    def __init__(self) -> None:
        super().__init__()
        self.rows[117, LENGTH // 2 :] = self.rows[117, LENGTH // 2 :].flip(0)


Sorting = Bad


def make_optimizer"""


def test_a_run_of_a_script_that_is_called_by_itself_is_replayed(tmp_path: Path) -> None:
    script = tmp_path / "muon.py"
    source = (GALLERY / "muon.py").read_text()
    script.write_text(source.replace("lockstep.launch(train, workers=2)", "train('run', 4, 6, 2)"))
    run_command([sys.executable, script], cwd=tmp_path, check=True)
    assert EQUAL in passed("replay", tmp_path / "run", "--step", 3)


def test_a_bad_sample_is_named(tmp_path: Path) -> None:
    changes = {"def make_optimizer": BAD_SAMPLE.strip()}
    run = example_run(tmp_path / "bad", changes, steps=60, save_every=20)
    step = next(step for step in range(41, 61) if 117 in samples_of(step - 1))
    shown = passed("why", run, "--step", step)
    assert re.search(r"highest losses.*\n  samples 117, in micro-batch", shown), shown


def samples_of(step: int) -> list[int]:
    order = UniformOrder(240, batch_size=24, micro_batches=6, seed=0)
    return [i for k in range(6) for i in order.ids(step, k).tolist()]


def test_the_commands_refuse_what_is_no_run(tmp_path: Path) -> None:
    for words in (("replay", tmp_path, "--step", 1), ("why", tmp_path, "--step", 1)):
        assert "is not a run" in refused(*words)
    assert "is not a run" in refused("diff", tmp_path, tmp_path)
    for name, step in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        append_json(tmp_path / name / "metrics.jsonl", {"step": step, "loss": 1.0})
    assert "no step is in both records" in refused("diff", tmp_path / "a", tmp_path / "b")
