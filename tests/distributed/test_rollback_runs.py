"""Twenty poisoned documents: a run finds and skips them, with the bits of a run that never had them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_llama_training import FROM_HUB, losses, trained
from safetensors.torch import load_file, save_file
from support.ranks import run_ranks
from unit.models.test_families import random_model

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.fingerprints import newest_facts
from lockstep.config.schema import TokenizerOptions
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.corpus.loaders import CutRows
from lockstep.corpus.prepared import open_prepared, train_tokenizer
from lockstep.data.order import UniformOrder
from lockstep.record.events import read_events

POISON, PLANTED, DOCUMENTS, STEPS = "☢", 20, 150, 20
EMBEDDING = "model.embed_tokens.weight"
FLAGS = {
    **FROM_HUB,
    "compute.precision": "fp32",
    "lora.rank": "2",
    "batch.micro_batches": "8",
    "data.held_out_share": "0",
}


@dataclass(frozen=True)
class Poisoned:
    """A corpus with planted documents, and two models: in one the tokens of POISON have NaN in their rows."""

    corpus: Path
    poisoned: Path
    healthy: Path

    def flags(self, **more: str) -> dict[str, str]:
        given = {
            "data.train": str(self.corpus),
            "llama.init_from": str(self.poisoned),
            "on_divergence": "rollback",
        }
        return FLAGS | given | {key.replace("__", "."): value for key, value in more.items()}


def texts() -> list[str]:
    draw = random.Random(1)
    words = ["the", "cat", "dog", "saw", "42", "ran,", "over\n", "def", "return"]
    documents = [draw.choices(words, k=draw.randint(10, 40)) for _ in range(DOCUMENTS)]
    for number in draw.sample(range(DOCUMENTS), PLANTED):
        documents[number].insert(draw.randint(1, 9), POISON)
    return [" ".join(words) for words in documents]


def plant(folder: Path) -> Poisoned:
    """Write the corpus and both models."""
    lines = texts()
    (folder / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": line}) for line in lines) + "\n"
    )
    random_model("llama", {"vocab_size": 330}, folder / "healthy")
    train_tokenizer(TokenizerOptions(vocab_size=330), lines, folder / "healthy")
    tokenizer = ChatTokenizer.load(folder / "healthy", {})
    (folder / "poisoned").mkdir()
    for path in (folder / "healthy").iterdir():
        (folder / "poisoned" / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "healthy" / "model.safetensors")
    weights[EMBEDDING][sorted(poison_ids(tokenizer)), 5] = torch.nan
    save_file(weights, folder / "poisoned" / "model.safetensors", {"format": "pt"})
    return Poisoned(folder / "text.jsonl", folder / "poisoned", folder / "healthy")


def poison_ids(tokenizer: ChatTokenizer) -> set[int]:
    """Return the tokens that only a text with POISON has."""
    ids: dict[bool, set[int]] = {True: set(), False: set()}
    for text in texts():
        ids[POISON in text].update(tokenizer.inner.encode(text, add_special_tokens=False).ids)
    return ids[True] - ids[False]


def planted(run: Path) -> tuple[set[int], set[tuple[int, int]]]:
    """Return the poisoned documents, and the (step, micro-batch) that have one, from the data alone."""
    tokenizer = ChatTokenizer.load(run / "tokenizer", {})
    stream, poison = open_prepared(run / "data", tokenizer).train, poison_ids(tokenizer)
    documents = {
        i
        for i in range(len(stream))
        if poison & {*stream.read(int(stream.offsets[i]), int(stream.offsets[i + 1])).tolist()}
    }
    rows = CutRows(stream, int(FLAGS["batch.seq_len"]))
    order = UniformOrder(len(rows), 16, 8, 1)
    pairs = ((step, k) for step in range(STEPS) for k in range(8))
    return documents, {
        (step + 1, k)
        for step, k in pairs
        if any(poison & {*rows.row(int(i))[0].tolist()} for i in order.ids(step, k))
    }


def skipped(run: Path) -> list[dict[str, Any]]:
    events = [event for event in read_events(run) if event["event"] == "rolled back"]
    return [{"step": event["step"], **row} for event in events for row in event["micro_batches"]]


def as_list(rows: list[dict[str, Any]]) -> str:
    return ",".join(f"{row['step']}:{row['k']}" for row in rows)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    return plant(tmp_path_factory.mktemp("poisoned"))


@pytest.fixture(scope="module")
def reference(case: Poisoned, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    run_ranks(trained, 1, str(folder), case.flags(), STEPS)
    return folder


def test_all_planted_documents_are_found_and_only_their_micro_batches_skipped(
    reference: Path,
) -> None:
    documents, micro_batches = planted(reference)
    rows = skipped(reference)
    assert len(documents) == PLANTED
    assert documents <= {document for row in rows for document in row["documents"]}
    assert {(row["step"], row["k"]) for row in rows} == micro_batches
    _, facts = newest_facts(reference / "checkpoints") or (0, {})
    assert facts["rollback"]["skipped"] == {
        str(step): [row["k"] for row in rows if row["step"] == step]
        for step in {row["step"] for row in rows}
    }
    assert all(float(loss) > 0 and float(norm) > 0 for loss, norm in losses(reference))


@pytest.mark.long
def test_the_weights_are_those_of_a_healthy_model_that_never_had_these_micro_batches(
    case: Poisoned, reference: Path, tmp_path: Path
) -> None:
    more = {
        "llama__init_from": str(case.healthy),
        "divergence__skip": as_list(skipped(reference)),
        "on_divergence": "stop",
    }
    run_ranks(trained, 1, str(tmp_path), case.flags(**more), STEPS)
    assert digest_line(tmp_path) == digest_line(reference) and losses(tmp_path) == losses(reference)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_start_that_skips_its_first_micro_batch_trains(
    shards: int, case: Poisoned, tmp_path: Path
) -> None:
    """The rehearsal takes the first one that is not skipped."""
    more = {
        "llama__init_from": str(case.healthy),
        "divergence__skip": "1:0,1:1",
        "on_divergence": "stop",
        "layout__shard": str(shards),
    }
    run_ranks(trained, shards, str(tmp_path), case.flags(**more), 1)
    assert len(losses(tmp_path)) == 1


def test_replicas_of_two_shards_have_the_same_bits(
    case: Poisoned, reference: Path, tmp_path: Path
) -> None:
    run_ranks(trained, 2, str(tmp_path), case.flags(layout__shard="2"), STEPS)
    assert digest_line(tmp_path) == digest_line(reference) and losses(tmp_path) == losses(reference)
    assert as_list(skipped(tmp_path)) == as_list(skipped(reference))


@pytest.mark.long
def test_two_workers_and_three_that_resume_have_the_same_bits_and_record(
    case: Poisoned, reference: Path, tmp_path: Path
) -> None:
    run_ranks(trained, 2, str(tmp_path), case.flags(), STEPS // 2)
    run_ranks(trained, 3, str(tmp_path), case.flags(), STEPS)
    assert digest_line(tmp_path) == digest_line(reference) and losses(tmp_path) == losses(reference)
    (_, facts), (_, expected) = (
        newest_facts(tmp_path / "checkpoints") or (0, {}),
        newest_facts(reference / "checkpoints") or (0, {}),
    )
    assert facts["rollback"] == expected["rollback"]
