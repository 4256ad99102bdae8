"""`lockstep evaluate RUN --lm-eval TASKS`: score a checkpoint with the library lm-eval.

lm-eval loads a temporary export in the run folder with transformers, so the scores are those of
`lm_eval --model hf` on an export.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lockstep.checkpoint.folder import committed_steps
from lockstep.checkpoint.policy import choose_step
from lockstep.errors import UsageError
from lockstep.models.llama_io import CHECKPOINTS, export_run, is_llama_run, refuse_no_model
from lockstep.tasks.evaluate import append_record
from lockstep.tasks.evaluator import EvalSpec


def evaluate_with_lm_eval(folder: Path, step: int | None, tasks: str, include_path: Path | None, *, chat: bool) -> str:
    """Score a checkpoint (None: the newest) and add a line to evaluations.jsonl; return a table.

    tasks  names, separated by commas; include_path: a folder of further tasks; chat: apply the template
    """
    if not is_llama_run(folder):
        refuse_no_model(folder)
        raise UsageError(f"{folder} is a Hugging Face model, not a run", str(folder), f"try lm_eval --model_args pretrained={folder}")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models import huggingface  # noqa: F401  imports transformers and accelerate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise UsageError(f"lm-eval cannot be imported: {error}", "--lm-eval", 'pip install "lockstep-train[eval]"') from error
    step = choose_step(step, committed_steps(folder / CHECKPOINTS), folder)
    manager = TaskManager(include_path=include_path and str(include_path))
    options = {"task_manager": manager, "device": "cuda" if torch.cuda.is_available() else "cpu", "apply_chat_template": chat}
    with TemporaryDirectory(prefix=".lm-eval-", dir=folder) as temporary:
        export_run(folder, step, Path(temporary) / "model")
        try:
            results = simple_evaluate("hf", {"pretrained": f"{temporary}/model"}, tasks.split(","), log_samples=False, **options)
        except (ValueError, KeyError) as error:
            raise UsageError(f"lm-eval failed: {error}", f"--lm-eval {tasks}", "list the tasks with lm_eval ls tasks") from error
    scores = {f"{task}/{name}": value for task, values in results["results"].items() for name, value in values.items() if name != "alias"}
    split = f"lm-eval {tasks}{' --chat' * chat}"  # no other line has it, and selection of the best step skips it
    append_record(folder, {"step": step, **vars(EvalSpec()), "split": split, **scores})
    return f"step {step:,}\n{make_table(results)}"
