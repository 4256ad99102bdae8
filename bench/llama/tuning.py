"""Fine-tuning from end to end on questions made by rule: pre-train, then tune all weights or adapters alone, and count right answers.

    python -m bench.llama.tuning FOLDER

    base    pre-trained on questions and answers as plain text, of the training split alone
    full    the base tuned on chats, all weights
    lora    the base tuned on the same chats, adapters of rank 4 alone; merged, it answers in `transformers` too, where that is installed

Held-out chats are in no training text. `lockstep train` with two workers trains everything; existing runs resume.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from lockstep.checkpoint.store import CheckpointStore
from lockstep.corpus.chats import drills
from lockstep.corpus.documents import choose_split
from lockstep.models.llama_io import open_weights
from lockstep.record.metrics import read_metrics

CHATS = 30_000
SMALL = [
    "--batch.micro_batches",
    "4",
    "--batch.tokens",
    "2048",
    "--batch.seq_len",
    "128",
    "--checkpoint.every_steps",
    "0",
    "--evaluate.at_end",
    "2000",
]


def write_corpus(folder: Path) -> None:
    """FOLDER/{train,validation,test}.jsonl, chats; FOLDER/text.jsonl, those of train as text. Each chat once."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = {json.dumps(chat.messages): chat for chat in drills(CHATS)}
    files = {
        name: open(folder / f"{name}.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        for name in ("train", "validation", "test", "text")
    }
    for key, chat in chats.items():
        split = choose_split(key, 0.05)
        files[split].write(json.dumps({"messages": chat.messages}) + "\n")
        if split == "train":
            files["text"].write(
                json.dumps({"text": "\n".join(message["content"] for message in chat.messages)})
                + "\n"
            )
    for file in files.values():
        file.close()


def train(folder: Path, *words: str) -> None:
    """`lockstep train` in a folder with these values."""
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "--workers",
        "2",
        "--out",
        str(folder),
        *SMALL,
        *words,
    ]
    subprocess.run(command, check=True)


def trained_share(run: Path, base: Path) -> float:
    """Numbers in the optimizer of a run over those of the whole model."""
    store = CheckpointStore(run / "checkpoints")
    found = store.load_newest()
    assert found is not None
    in_optimizer = sum(
        tensor.numel() for name, tensor in found.tensors.items() if name.endswith(".exp_avg")
    )
    return in_optimizer / sum(tensor.numel() for tensor in open_weights(base).tensors.values())


def right_in_transformers(run: Path, folder: Path, most: int = 60) -> str:
    """How many of some held-out chats, taken evenly, the merged export answers rightly in transformers, and how many as here."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: not compared"
    import torch
    import transformers

    if not (folder / "merged").exists():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "lockstep",
                "checkpoint",
                "export",
                str(run),
                "--out",
                str(folder / "merged"),
            ],
            check=True,
        )
    lines = (folder / "test.jsonl").read_text().splitlines()
    asked = [json.loads(line)["messages"] for line in lines[:: -(-len(lines) // most)]]
    questions = "\n".join(messages[0]["content"] for messages in asked)
    words = [sys.executable, "-m", "lockstep", "generate", str(run), "--chat", "--tokens", "24"]
    ours = [
        json.loads(line)
        for line in subprocess.run(
            words, input=questions, text=True, check=True, capture_output=True
        ).stdout.splitlines()
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "merged", dtype=torch.float32
    )
    theirs = []
    for messages in asked:
        text = tokenizer.apply_chat_template(
            messages[:1], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(
            text, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False
        )
        made = model.generate(**ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
        theirs.append(
            tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    right = sum(
        answer.strip() == messages[-1]["content"]
        for answer, messages in zip(theirs, asked, strict=True)
    )
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    return f"merged, in transformers: {right} of {len(asked)} right, {same} of {len(asked)} the same answers as here"


def main(folder: Path) -> None:
    """Train the missing runs and print the table."""
    if not (folder / "text.jsonl").exists():
        write_corpus(folder)
    base, full, lora = (folder / name for name in ("base", "full", "lora"))
    chats = [
        word
        for split in ("train", "validation", "test")
        for word in (f"--data.{split}", f"{folder / split}.jsonl")
    ]
    rate = [
        "--optim.learning_rate",
        "4e-3",
        "--optim.warmup_steps",
        "30",
        "--optim.weight_decay",
        "0.1",
    ]
    text = ["--task", "pretrain", "--data.kind", "text", "--data.train", f"{folder}/text.jsonl"]
    new = [
        "--llama.size",
        "1M",
        "--tokenizer.vocab_size",
        "400",
        "--steps",
        "250",
        "--optim.decay_steps",
        "250",
    ]
    train(base, *text, *new, *rate)
    tuned = [
        "--task",
        "sft",
        "--data.kind",
        "chat",
        *chats,
        "--llama.init_from",
        str(base),
        "--steps",
        "120",
        "--optim.decay_steps",
        "120",
    ]
    train(full, *tuned, *rate[2:], "--optim.learning_rate", "1e-3")
    adapters = ["--lora.rank", "4", "--lora.alpha", "16"]
    train(
        lora,
        *tuned,
        *rate[2:4],
        "--optim.learning_rate",
        "1e-2",
        "--optim.weight_decay",
        "0",
        *adapters,
    )
    for run in (full, lora):
        line = [
            line for line in read_metrics(run / "evaluations.jsonl") if line["split"] == "test"
        ][-1]
        print(
            f"{run.name}: {line['exact_match']:.1%} of {line['chats']} held-out answers right, loss {line['loss']:.4f}, ",
            end="",
        )
        print(f"{trained_share(run, base):.2%} of the parameters in the optimizer")
    print(right_in_transformers(lora, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
