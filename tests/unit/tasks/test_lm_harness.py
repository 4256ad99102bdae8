"""`lockstep evaluate RUN --lm-eval`: a task in a YAML file, scored as lm-eval scores the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lockstep.cli.main import main
from lockstep.corpus.tokenizer import Tokenizer
from lockstep.errors import UsageError
from lockstep.models.llama_io import export_run, import_hub
from lockstep.tasks.evaluate import evaluate_with_lm_eval

lm_eval = pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # other libraries warn

DATA = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
task: larger
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATE = """
task: next_word
output_type: generate_until
generation_kwargs: {{until: ["."], max_gen_toks: 6}}
doc_to_target: "{{{{choices[0]}}}}"
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a random Llama, and a folder of two tasks beside it."""
    folder = tmp_path_factory.mktemp("lm-eval")
    texts = ["Which is larger, 10 or 90? The cat sat on the mat."] * 9
    Tokenizer.train_on_documents(texts, vocab_size=300, min_frequency=1).save_for_llama(
        folder / "hub"
    )
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=320, max_position_embeddings=64, initializer_range=0.5, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "hub")
    import_hub(folder / "hub", folder / "run")
    lines = [
        {
            "question": f"Which is larger, {n} or {99 - n}?",
            "choices": [" 10", " cat", " the mat"],
            "gold": n % 3,
        }
        for n in range(12)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "tasks").mkdir()
    for name, text in (("larger", CHOICE), ("next_word", GENERATE)):
        (folder / f"tasks/{name}.yaml").write_text(
            (DATA + text).format(data=folder / "questions.jsonl")
        )
    return folder / "run"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_scores_equal_those_of_lm_eval_on_the_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "evaluate",
                str(run),
                "--lm-eval",
                "larger,next_word",
                "--include-path",
                str(run.parent / "tasks"),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("step 0\n") and "acc_norm" in shown and "exact_match" in shown
    export_run(run, 0, tmp_path / "export")
    model = lm_eval.models.huggingface.HFLM(pretrained=str(tmp_path / "export"), device="cpu")
    manager = lm_eval.tasks.TaskManager(
        include_path=str(run.parent / "tasks"), include_defaults=False
    )
    results = lm_eval.simple_evaluate(model, tasks=["larger", "next_word"], task_manager=manager)[
        "results"
    ]
    [line] = map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())
    scores = {key: value for key, value in line.items() if "/" in key}
    assert len(scores) > 4 and 0 < scores["larger/acc,none"] < 1
    assert scores == {
        f"{task}/{name}": value
        for task, values in results.items()
        for name, value in values.items()
        if name != "alias"
    }
    assert not list(run.glob(".lm-eval-*")), "the export is temporary"


@pytest.mark.long
def test_an_unknown_task_is_a_usage_error(run: Path) -> None:
    with pytest.raises(UsageError, match="no_such_task"):
        evaluate_with_lm_eval(run, None, "no_such_task", run.parent / "tasks", chat=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lm-eval", "larger", "--follow"], "cannot be combined with --follow"),
        (["--lm-eval", "larger", "--workers", "2"], "cannot be combined with --workers"),
        (["--chat"], "cannot be combined with no --lm-eval"),
    ],
)
def test_options_that_lm_eval_does_not_use_are_refused(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), *words]) == 2 and message in capsys.readouterr().err


def test_a_hugging_face_folder_is_left_to_lm_eval(run: Path) -> None:
    with pytest.raises(UsageError, match="not a run"):
        evaluate_with_lm_eval(run.parent / "hub", None, "larger", None, chat=False)
