"""A plain loop over the rows of a run, as an oracle of its losses, and a small corpus."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config.schema import RunConfig
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.corpus.loaders import CutRows, DocumentRows, PackedRows
from lockstep.corpus.prepared import open_prepared
from lockstep.data.order import UniformOrder


def write_corpus(folder: Path) -> Path:
    """Write 150 short documents to a file in `folder`; return its path."""
    words = ["the", "cat", "dog", "saw", "42", "ran,", "over\n", "def", "return"]
    texts = [
        " ".join(words[(number * k) % 9] for k in range(1, 10 + number % 30))
        for number in range(150)
    ]
    (folder / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts) + "\n"
    )
    return folder / "text.jsonl"


def plain_losses(model: nn.Module, run: Path, options: RunConfig) -> list[float]:
    """Train in a plain loop: each document of a row alone, gradients added, AdamW of torch."""
    stream, length = (
        open_prepared(run / "data", ChatTokenizer.load(run / "tokenizer", {})).train,
        options.batch.seq_len,
    )
    rows: CutRows | PackedRows | DocumentRows = CutRows(stream, length)
    if not options.data.packing:
        rows = DocumentRows(stream, length)
    elif options.task == "sft":
        rows = PackedRows(stream, length, np.load(next((run / "data").glob("rows-*.npy"))))
    k, optim = options.batch.micro_batches, options.optim
    order = UniformOrder(len(rows), k * options.batch.tokens // length, k, options.seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, others = (
        [p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=optim.learning_rate, betas=(optim.beta1, optim.beta2), eps=optim.epsilon
    )
    curve = []
    for step in range(options.steps):
        total, count = 0.0, 0
        for row in (row for micro_batch in range(k) for row in order.ids(step, micro_batch)):
            tokens, labels, documents = (torch.from_numpy(column) for column in rows.row(int(row)))
            end = int((labels != -100).nonzero().max()) + 1  # padding and prompts without an answer
            tokens, labels, documents = tokens[:end], labels[:end], documents[:end]
            for document in documents.unique():
                inside = documents == document
                logits = model(tokens[inside][None]).logits[0]
                loss = F.cross_entropy(logits, labels[inside], reduction="sum", ignore_index=-100)
                total, count = (
                    total + float(loss.detach()),
                    count + int((labels[inside] != -100).sum()),
                )
                loss.backward()
        for parameter in parameters:
            parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(parameters, optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(total / count)
    return curve
