"""Llama pre-training, chats, adapters: same bits on 1 to 3 workers; files for transformers."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launching import run_command
from support.ranks import run_ranks

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.store import CheckpointStore
from lockstep.cli.main import main
from lockstep.config import schema as config
from lockstep.config.resolve import resolve
from lockstep.config.saved_run import open_run
from lockstep.config.schema import LoraOptions, RunConfig
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.corpus.chats import Chat, chat_samples, drills, encode
from lockstep.corpus.loaders import (
    IGNORE_INDEX,
    CutRows,
    DocumentRows,
    PackedRows,
    Row,
    RowLoader,
    WindowRows,
    batch_of,
    pack,
    pack_rows,
)
from lockstep.corpus.prepared import open_prepared
from lockstep.corpus.token_stream import TokenStream, TokenStreamWriter
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, DataError, UsageError
from lockstep.models import lora
from lockstep.models.llama import Llama
from lockstep.models.llama_config import LLAMA_CONFIGS
from lockstep.models.llama_io import InitialWeights, load_llama, open_weights
from lockstep.models.lora import merged_weights
from lockstep.parallel.deferred_init import materialize
from lockstep.recipes.script import lock_run_folder, train
from lockstep.record.metrics import read_metrics
from lockstep.tasks.evaluate import evaluate, evaluate_at_end
from lockstep.tasks.language_model import prepare_documents

CPU = torch.device("cpu")
STEPS = 3
FROM_HUB = {
    "task": "pretrain",
    "data.kind": "text",
    "data.held_out_share": "0.1",
    "batch.micro_batches": "3",
    "batch.tokens": "64",
    "batch.seq_len": "32",
    "compute.precision": "bf16",
    "optim.warmup_steps": "0",
    "optim.schedule": "constant",
    "checkpoint.every_steps": "0",
    "evaluate.at_end": "0",
}
TEXT = {**FROM_HUB, "tokenizer.vocab_size": "330", "llama.size": "1M"}
CHATS = {
    **TEXT,
    "task": "sft",
    "data.kind": "drills",
    "data.pairs": "300",
    "batch.tokens": "128",
    "batch.seq_len": "64",
}
ADAPTERS = {"lora.rank": "4", "lora.alpha": "64"}


def trained(runtime: ElasticRuntime, folder: str, flags: dict[str, str], steps: int) -> str:
    """Train in `folder` up to step `steps`; return the digest of the state."""
    path = Path(folder)
    resolved = open_run(path, None, {**flags, "steps": str(steps)}, {})
    if runtime.world.leader:
        with lock_run_folder(path, resolved):
            pass
    train(resolved, path, runtime)
    return digest_line(path) if runtime.world.leader else ""


def evaluated(runtime: ElasticRuntime, folder: str, split: Any) -> str:
    return evaluate(Path(folder), runtime, split=split)


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["norm"]) for line in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 documents of generated sentences, 10 to 60 words each."""
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    draw = random.Random(1)
    words = ["the", "cat", "dog", "saw", "Häuser", "42", "ran,", "over\n", "def", "return"]
    lines = [
        json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(10, 60)))})
        for _ in range(150)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder pre-trained by one process."""
    folder = tmp_path_factory.mktemp("base") / "run"
    run_ranks(trained, 1, str(folder), {**TEXT, "data.train": str(corpus)}, STEPS)
    return folder


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with adapters over `base`, trained on chats by one process."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    run_ranks(trained, 1, str(folder), {**CHATS, **ADAPTERS, "llama.init_from": str(base)}, STEPS)
    return folder


def test_the_logged_loss_equals_that_of_a_plain_loop(corpus: Path, tmp_path: Path) -> None:
    schedule = {
        "optim.schedule": "linear",
        "optim.decay_steps": "20",
        "optim.warmup_steps": "4",
        "optim.learning_rate": "3e-3",
    }
    run_ranks(
        trained,
        2,
        str(tmp_path),
        {**TEXT, **schedule, "data.train": str(corpus), "compute.precision": "fp32"},
        20,
    )
    bare = Path(__file__).parents[2] / "bench" / "llama" / "bare_llama.py"
    shown = run_command(
        [sys.executable, bare, tmp_path, "--steps", "20"], check=True
    ).stdout.splitlines()
    assert (
        sum("run" in line.split() for line in shown[:-1]) == 20 and "over 20 steps" in shown[-1]
    ), shown
    line = [loss for loss, _ in losses(tmp_path)]
    assert line[-1] < line[0] - 1 and float(shown[-1].split()[-1]) < 2e-5, shown


def trained_on_a_stream(runtime: ElasticRuntime, folder: str, flags: dict[str, str]) -> str:
    """Train on rows that are consumed: each call of the loader takes the next ones."""
    read, calls = RowLoader.micro_batch, itertools.count()
    RowLoader.micro_batch = lambda self, step, k: read(self, step + next(calls), k)  # type: ignore[method-assign]
    return trained(runtime, folder, flags, 1)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_recipe_whose_data_do_not_follow_from_the_step_is_refused(
    shards: int, corpus: Path, tmp_path: Path
) -> None:
    flags = {**TEXT, "data.train": str(corpus), "layout.shard": str(shards)}
    with pytest.raises(
        AssertionError, match=r"the loss of micro-batch 0 of step 1 is [\d.]+ the first time and"
    ):
        run_ranks(trained_on_a_stream, shards, str(tmp_path), flags)


# -- rows -------------------------------------------------------------------------------------------------------------


def stream_of(
    folder: Path, documents: list[list[int]], counts: list[list[bool]] | None = None
) -> TokenStream:
    writer = TokenStreamWriter(
        folder, "train", 100, has_loss_mask=counts is not None, shard_tokens=16
    )
    for number, ids in enumerate(documents):
        writer.add(ids, counts[number] if counts else None)
    writer.close()
    return TokenStream.open(folder, "train")


@pytest.fixture
def documents(tmp_path: Path) -> TokenStream:
    return stream_of(tmp_path, [[1, *range(10, 10 + n), 2] for n in (3, 0, 20, 1, 9)])


def test_cut_rows_predict_every_token_except_the_first_of_a_document(
    documents: TokenStream,
) -> None:
    rows = CutRows(documents, 6)
    flat, owner = documents.read(0, documents.tokens), documents.documents_at(0, documents.tokens)
    for i in range(len(rows)):
        tokens, labels, inside = rows.row(i)
        for at in range(6):
            place = 6 * i + at
            assert tokens[at] == flat[place] and inside[at] == owner[place]
            assert labels[at] == (
                flat[place + 1] if owner[place + 1] == owner[place] else IGNORE_INDEX
            )
    batch = batch_of([rows.row(0), rows.row(2)], CPU)
    assert batch.documents is not None and batch_of([rows.row(2)], CPU).documents is None


def rows_of(stream: TokenStream, length: int) -> Iterator[Row]:
    rows = WindowRows(stream, length)
    return map(rows.row, range(len(rows)))


def test_windows_score_every_token_once_with_context(documents: TokenStream) -> None:
    scored: Counter[int] = Counter()
    begin = 0
    for number, (tokens, labels, _) in enumerate(rows_of(documents, 8)):
        begin = 4 * number
        assert tokens.tolist() == documents.read(begin, begin + len(tokens)).tolist()
        places = begin + np.flatnonzero(labels != IGNORE_INDEX)
        scored.update((places + 1).tolist())
        assert number == 0 or all(place >= begin + 4 for place in places)
    first_ones = set(documents.offsets[:-1].tolist())
    assert scored == {place: 1 for place in range(documents.tokens) if place not in first_ones}


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=60), st.integers(0, 5))
def test_packing_keeps_every_document_and_overfills_no_row(sizes: list[int], seed: int) -> None:
    rows = pack(np.array(sizes, dtype=np.int64), 20, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in row) <= 20 for row in rows)
    spare = sorted(20 - sum(sizes[i] for i in row) for row in rows)
    assert len(spare) < 2 or sum(spare[:-1]) < 20 * max(1, len(rows)) / 2, (
        "most rows are at least half full"
    )


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=30),
    st.integers(0, 5),
)
def test_labels_of_packed_rows_are_those_of_their_documents(
    masks: list[list[bool]], seed: int
) -> None:
    """The index holds the rows of `pack`, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        stream = stream_of(Path(folder), [[1] * len(mask) for mask in masks], masks)
        rows = PackedRows(stream, 16, pack_rows(stream, 16, seed))
        expected = pack(np.array([len(mask) - 1 for mask in masks]), 16, seed)
        labels = [rows.row(i)[1] for i in range(len(rows))]
    assert [int((row != IGNORE_INDEX).sum()) for row in labels] == [
        sum(sum(masks[i][1:]) for i in row) for row in expected
    ]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=12), st.booleans())
def test_rows_of_one_document_have_each_of_its_labels_once(
    masks: list[list[bool]], is_chat: bool
) -> None:
    """Also of documents without a token, or longer than a row."""
    texts = [[*range(100 * n, 100 * n + len(mask))] for n, mask in enumerate(masks)]
    with tempfile.TemporaryDirectory() as folder:
        stream = stream_of(Path(folder), texts, masks if is_chat else None)
        rows = DocumentRows(stream, 16)
        read = [(rows.members(i), *rows.row(i)) for i in range(len(rows))]
    expected = [
        [label for label, counts in zip(ids[1:], mask[1:], strict=True) if counts or not is_chat]
        for ids, mask in zip(texts, masks, strict=True)
    ]
    labels: list[list[int]] = [[] for _ in texts]
    for (member,), tokens, row_labels, documents in read:
        places = np.flatnonzero(row_labels != IGNORE_INDEX)
        assert (tokens[places] + 1 == row_labels[places]).all() and not documents.any()
        labels[member] += row_labels[places].tolist()
    assert labels == expected


def test_packed_rows_have_the_loss_of_single_chats(tmp_path: Path) -> None:
    draw = random.Random(2)
    chats = [[draw.randrange(1, 90) for _ in range(draw.randint(2, 12))] for _ in range(9)]
    counts = [[draw.random() < 0.5 for _ in ids] for ids in chats]
    stream = stream_of(tmp_path, chats, counts)
    rows = PackedRows(stream, 16, pack_rows(stream, 16, seed=1))
    model = InitialWeights.of(run_of(TEXT | {"data.train": "x"}), 100).meta_model()
    model = materialize(
        model,
        CPU,
        lambda name, size: (
            torch.randn(size, generator=torch.Generator().manual_seed(len(name))) / 8
        ),
    ).double()
    batch = batch_of([rows.row(i) for i in range(len(rows))], CPU)
    alone, labels = 0.0, 0
    for ids, learnt in zip(chats, counts, strict=True):
        logits = model(torch.tensor([ids[:-1]]))[0]
        target = torch.tensor(
            [
                id if counted else IGNORE_INDEX
                for id, counted in zip(ids[1:], learnt[1:], strict=True)
            ]
        )
        alone += float(
            F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORE_INDEX).detach()
        )
        labels += sum(learnt[1:])
    assert float(model(batch.tokens, batch.labels, batch.documents).detach()) == pytest.approx(
        alone, rel=1e-9
    )
    assert int((batch.labels != IGNORE_INDEX).sum()) == labels


def run_of(flags: dict[str, str]) -> RunConfig:
    return resolve(None, flags).run


# -- chats ------------------------------------------------------------------------------------------------------------


def test_the_loss_mask_covers_answers_including_their_eos_token(adapted: Path) -> None:
    tokenizer = ChatTokenizer.load(adapted / "tokenizer", {})
    talk = [
        ("system", "Be brief."),
        ("user", "1 + 1?"),
        ("assistant", " two "),
        ("user", "<b>?"),
        ("assistant", ""),
        ("user", "so"),
    ]
    chat = Chat([{"role": role, "content": content} for role, content in talk], "here")
    ids, counts = encode(tokenizer, chat)
    answers = [list(run) for run in runs(ids, counts)]
    eot = tokenizer.inner.token_to_id("<|eot_id|>")
    assert [tokenizer.decode(answer) for answer in answers] == ["two", ""] and all(
        answer[-1] == eot for answer in answers
    )
    first = counts.index(True)
    assert ids[:first] == tokenizer.encode_chat(chat.messages[:2]), (
        "the ids before an answer are those of its prompt"
    )
    second = ids[: len(ids) - len(answers[-1])]
    assert second == tokenizer.encode_chat(chat.messages[:4]) and ids[-1] == eot


def runs(ids: list[int], counts: list[bool]) -> Any:
    """Yield the spans of ids with a loss."""
    span: list[int] = []
    for id, counted in zip(ids, counts, strict=True):
        if counted:
            span.append(id)
        elif span:
            yield span
            span = []
    if span:
        yield span


def test_unusable_templates_are_refused(adapted: Path) -> None:
    expected = ChatTokenizer.load(adapted / "tokenizer", {})
    chat = next(iter(drills(1)))
    no_end = ChatTokenizer(
        expected.inner,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        {},
        expected.eos_ids,
        expected.folder,
    )
    with pytest.raises(DataError, match="does not end an answer with an eos token"):
        encode(no_end, chat)
    rewrites = ChatTokenizer(
        expected.inner,
        "{{ messages | length }}{{ messages[-1].content }}",
        {},
        expected.eos_ids,
        expected.folder,
    )
    with pytest.raises(DataError, match="does not append answer"):
        encode(rewrites, chat)


def test_too_long_chats_are_dropped_and_counted(adapted: Path) -> None:
    tokenizer = ChatTokenizer.load(adapted / "tokenizer", {})
    data = run_of({"task": "sft", "data.kind": "drills", "data.pairs": "200"}).data
    longest = max(len(sample.ids[0]) for sample in chat_samples(tokenizer, data, 1000, Counter()))
    for length, fits in (
        (longest - 1, True),
        (longest - 2, False),
    ):  # the last token of a chat is only predicted
        left_out: Counter[str] = Counter()
        lengths = [len(sample.ids[0]) for sample in chat_samples(tokenizer, data, length, left_out)]
        reasons = {} if fits else {f"longer than a row of {length} tokens": 200 - len(lengths)}
        assert (max(lengths) == longest) == fits and left_out == reasons


# -- pre-training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_pretraining_has_the_same_bits_on_any_number_of_workers(
    base: Path, corpus: Path, tmp_path: Path, size: int
) -> None:
    run_ranks(trained, size, str(tmp_path), {**TEXT, "data.train": str(corpus)}, STEPS)
    assert digest_line(tmp_path) == digest_line(base) and losses(tmp_path) == losses(base)


def test_the_held_out_loss_is_the_same_on_any_number_of_ranks(base: Path) -> None:
    run_ranks(evaluated, 2, str(base), "test")
    run_ranks(evaluated, 1, str(base), "validation")
    line_of = {line["split"]: line for line in read_metrics(base / "evaluations.jsonl")}
    loaded = load_llama(base)
    data = open_prepared(base / "data", ChatTokenizer.load(base / "tokenizer", {}))
    for split, line in line_of.items():
        nats, tokens = 0.0, 0
        for row, labels, inside in rows_of(getattr(data, split), 32):
            logits = loaded.model(torch.tensor(row)[None], documents=torch.tensor(inside)[None])[0]
            nats += float(
                F.cross_entropy(
                    logits.double(),
                    torch.tensor(labels),
                    reduction="sum",
                    ignore_index=IGNORE_INDEX,
                )
            )
            tokens += int((labels != IGNORE_INDEX).sum())
        size = sum(len(record["text"].encode()) for record in data.records(split))
        assert (line["tokens"], line["bytes"]) == (tokens, size)
        assert line["loss"] == pytest.approx(nats / tokens, rel=1e-6)
        assert line["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_a_trained_run_works_with_generate_and_transformers(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(base), "the cat", "--tokens", "12"]) == 0
    said = capsys.readouterr().out
    assert main(["checkpoint", "export", str(base), "--out", str(tmp_path / "hub")]) == 0
    assert greedy_of_transformers(tmp_path / "hub", "the cat", 12) == said.rstrip("\n")


def greedy_of_transformers(folder: Path, prompt: str, tokens: int, chat: bool = False) -> str:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: answers are compared with its own"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        if chat
        else prompt
    )
    ids = tokenizer(
        text, return_tensors="pt", add_special_tokens=not chat, return_token_type_ids=False
    )
    ours = ChatTokenizer.load(folder, {})
    made = model.generate(
        **ids,
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=sorted(ours.eos_ids),
        pad_token_id=0,
    )
    answer: str = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def test_one_file_is_enough_and_holding_out_is_optional(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(json.loads(line)["text"] for line in corpus.read_text().splitlines())
    (tmp_path / "one.txt").write_text(text)
    flags = {**TEXT, "data.train": str(tmp_path / "one.txt")}
    prepare_documents(run_of(flags), tmp_path / "inside")
    prepared = open_prepared(
        tmp_path / "inside/data", ChatTokenizer.load(tmp_path / "inside/tokenizer", {})
    )
    assert (
        len(prepared.train) == len(prepared.validation) == len(prepared.test) == 1
        and prepared.train.tokens > 6 * prepared.test.tokens > 0
    )
    folder = tmp_path / "all"
    run_ranks(trained, 1, str(folder), {**flags, "data.held_out_share": "0"}, 1)
    prepared = open_prepared(folder / "data", ChatTokenizer.load(folder / "tokenizer", {}))
    assert (
        len(prepared.train) == 1
        and len(prepared.validation) == len(prepared.test) == prepared.test.tokens == 0
    )
    with ElasticRuntime.join(threads=1) as runtime:
        with pytest.raises(UsageError, match="the run has no validation split"):
            evaluate(folder, runtime)
        assert evaluate(folder, runtime, follow=True) == ""
        evaluate_at_end(folder, run_of({**flags, "steps": "1"}), runtime)
    assert "next: lockstep generate" in capsys.readouterr().out


def test_a_tokenizer_larger_than_the_embedding_is_refused_before_data_is_prepared(
    base: Path, corpus: Path, tmp_path: Path
) -> None:
    assert main(["checkpoint", "export", str(base), "--out", str(tmp_path / "hub")]) == 0
    tokenizer = ChatTokenizer.load(tmp_path / "hub", {})
    tokenizer.inner.add_tokens(["<extra>"])
    tokenizer.inner.save(str(tmp_path / "hub/tokenizer.json"))
    with pytest.raises(
        DataError, match=r"the tokenizer has ids up to 300, the embedding of the model 300 rows"
    ):
        prepare_documents(
            run_of({**TEXT, "data.train": str(corpus), "llama.init_from": str(tmp_path / "hub")}),
            tmp_path / "run",
        )
    assert not (tmp_path / "run/data").exists()


def test_every_size_can_be_configured() -> None:
    assert get_args(get_type_hints(config.LlamaOptions)["size"]) == tuple(LLAMA_CONFIGS)


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_adapters_have_the_same_bits_on_any_number_of_workers(
    base: Path, adapted: Path, tmp_path: Path, size: int
) -> None:
    run_ranks(
        trained, size, str(tmp_path), {**CHATS, **ADAPTERS, "llama.init_from": str(base)}, STEPS - 1
    )
    run_ranks(trained, 1, str(tmp_path), {**CHATS, **ADAPTERS, "llama.init_from": str(base)}, STEPS)
    assert digest_line(tmp_path) == digest_line(adapted) and losses(tmp_path) == losses(adapted)


def test_a_checkpoint_contains_only_adapters_and_is_small(base: Path, adapted: Path) -> None:
    checkpoint = CheckpointStore(adapted / "checkpoints").load(STEPS)
    names = [
        name.removeprefix("model.") for name in checkpoint.tensors if name.startswith("model.")
    ]
    assert len(names) == 2 * 7 * LLAMA_CONFIGS["1M"].n_layers and all(
        lora.is_adapter(name) for name in names
    )
    n_saved = sum(checkpoint.tensors[f"model.{name}"].numel() for name in names)
    whole = sum(tensor.numel() for tensor in open_weights(base).tensors.values())
    assert n_saved < 0.08 * whole and any(
        checkpoint.tensors[f"model.{name}"].abs().sum() for name in names if name.endswith(lora.UP)
    )


def test_adapters_start_at_zero_and_merge_exactly() -> None:
    with torch.device("meta"):
        model = lora.add_adapters(
            Llama(LLAMA_CONFIGS["1M"]), LoraOptions(4, 8.0, ("query", "down"))
        )
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * 2 * LLAMA_CONFIGS["1M"].n_layers and all(
        lora.is_adapter(name) for name in names
    )
    draw = torch.Generator().manual_seed(1)
    materialize(model, CPU, lambda name, size: torch.randn(size, generator=draw) * 0.05)
    tokens = torch.arange(12)[None]
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with torch.device("meta"):
        plain = Llama(LLAMA_CONFIGS["1M"])
    frozen = {name: values[name] for name in values if not lora.is_adapter(name)}
    merged = merged_weights(frozen, values, LoraOptions(4, 8.0, ("query", "down")))
    assert list(merged) == list(frozen)
    materialize(plain, CPU, lambda name, size: merged[name])
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    for name in names:
        if name.endswith(lora.UP):
            values[name].zero_()
    with torch.device("meta"):
        before = Llama(LLAMA_CONFIGS["1M"])
    materialize(before, CPU, lambda name, size: frozen[name])
    assert torch.equal(before(tokens), model(tokens))


def test_merged_adapters_generate_the_same_in_transformers(
    base: Path, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "Which is larger, 10 or 90?"
    assert main(["generate", str(adapted), asked, "--chat", "--tokens", "12"]) == 0
    ours = capsys.readouterr().out.rstrip("\n")
    assert main(["generate", str(base), asked, "--chat", "--tokens", "12"]) == 0
    assert capsys.readouterr().out.rstrip("\n") != ours, "the adapters make a difference"
    assert main(["checkpoint", "export", str(adapted), "--out", str(tmp_path / "hub")]) == 0
    assert greedy_of_transformers(tmp_path / "hub", asked, 12, chat=True) == ours


def test_adapters_over_other_weights_are_refused(
    base: Path, adapted: Path, corpus: Path, tmp_path: Path
) -> None:
    about = json.loads((adapted / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(about | {"start_sha256": "0" * 64}))
    (tmp_path / "checkpoints").symlink_to(adapted / "checkpoints")
    with pytest.raises(CheckpointError, match="have changed since the run"):
        load_llama(tmp_path)
