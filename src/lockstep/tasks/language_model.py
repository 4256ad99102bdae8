"""Training of a Llama, and the evaluation of its checkpoints.

Pre-training (or continued pre-training) cuts concatenated documents into rows; supervised
fine-tuning packs whole chats into rows, and its loss covers the answers only. Scores: nats per
token, bits per byte; for chats, exact match of answers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import state_dict
from lockstep.config.schema import RunConfig
from lockstep.corpus.text import prepare as data
from lockstep.corpus.text.chat_samples import chat_samples, chats, last_answer
from lockstep.corpus.text.chat_template import renderer
from lockstep.corpus.text.chat_tokenizer import ChatTokenizer, optional_json
from lockstep.corpus.text.documents import documents, held_inside, in_groups
from lockstep.corpus.text.packing import (
    IGNORE_INDEX,
    CutRows,
    PackedRows,
    RowLoader,
    batch_of,
    pack_rows,
    save_packed_rows,
    window,
)
from lockstep.corpus.text.prepare import PreparedText
from lockstep.corpus.text.token_stream import Ints, TokenStream
from lockstep.corpus.tokenizer import CHAT_SPECIALS, CHAT_TEMPLATE
from lockstep.data.manifest import MANIFEST, NOT_SHARED, FileDigests, verify_files
from lockstep.data.order import UniformOrder
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_in_run_folder
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.files import write_atomic, write_json
from lockstep.generation.decoder import Decoder
from lockstep.generation.sampling import (
    CONTEXT_TOKENS,
    TextStream,
    sample_tokens,
    stream_continuations,
)
from lockstep.log import log
from lockstep.models.hub import copy_files
from lockstep.models.llama import Llama
from lockstep.models.llama_config import LLAMA_CONFIGS, LlamaConfig
from lockstep.models.llama_io import (
    TOKENIZER,
    InitialWeights,
    LoadedLlama,
    load_llama,
    open_weights,
    write_model_json,
)
from lockstep.models.transformers_model import TransformersConfig, TransformersModel, limit_of_ropes
from lockstep.record.step_timer import flops_per_token
from lockstep.tasks.evaluator import (
    EvalResult,
    EvalSpec,
    Split,
    batches_of_rank,
    loss_record,
    merge_results,
)
from lockstep.units import format_count


@dataclass(frozen=True)
class LanguageModelTask(InitialWeights):
    """A Llama and its rows: the members of `TranslationTask`, those of the model inherited."""

    loader: RowLoader
    validation: TokenStream
    fingerprints: Mapping[str, str]

    @classmethod
    def open(
        cls, run: RunConfig, folder: Path, runtime: ElasticRuntime, digests: FileDigests
    ) -> Self:
        """Collective. Return the task over the rows of prepared data; rank 0 prepares it."""
        prepare = prepare_chats if run.task == "sft" else prepare_documents
        preparing = runtime.board.during("preparing")
        run_in_run_folder(runtime, lambda: preparing(prepare)(run, folder, digests))
        tokenizer = ChatTokenizer.load(folder / TOKENIZER, {})
        prepared = preparing(data.open_prepared)(folder / "data", tokenizer, digests)
        initial_weights = InitialWeights.of(
            run, tokenizer.inner.get_vocab_size(with_added_tokens=True)
        )
        start = run_in_run_folder(
            runtime, lambda: preparing(write_model_json)(initial_weights, folder)
        )
        fingerprints = prepared.fingerprints | {"start": start}
        if initial_weights.adapter:
            fingerprints["adapter"] = state_dict.digest(initial_weights.adapter)
        if run.llama.backend == "transformers":
            fingerprints["transformers"] = version("transformers")  # it holds the model's code
        assert_equal_on_all_ranks(runtime, fingerprints)
        length, stream = run.batch.seq_len, prepared.train
        rows: CutRows | PackedRows = CutRows(stream, length)
        if run.task == "sft":
            arguments = folder / "data", stream, length, run.seed, fingerprints["data"]
            name, digest = run_in_run_folder(
                runtime, lambda: preparing(save_packed_rows)(*arguments)
            )
            path = folder / "data" / name
            verify_files({path: digest}, path.with_suffix(".json"), digests)
            rows = PackedRows(stream, length, np.asarray(np.load(path, mmap_mode="r")))
        if not len(rows):
            what = f"the training text has fewer than {length} tokens, one row"
            raise DataError(what, f"{folder / 'data'}; batch.seq_len", "lower it")
        k = run.batch.micro_batches
        order = UniformOrder(len(rows), k * (run.batch.tokens // length), k, run.seed)
        loader = RowLoader(rows, order, runtime.world.device)
        return cls(
            **vars(initial_weights),
            loader=loader,
            validation=prepared.validation,
            fingerprints=fingerprints,
        )

    @property
    def length(self) -> int:
        return self.loader.rows.length

    @property
    def flops_per_token(self) -> float:
        embedding = 0 if self.config.tie_embeddings else self.config.vocab_size * self.config.dim
        parameters = list(self.meta_model().parameters())
        total = sum(p.numel() for p in parameters) - embedding
        trained = sum(p.numel() for p in parameters if p.requires_grad) if self.lora else total
        frozen = total - trained  # frozen weights need no gradient
        return (
            flops_per_token(total, self.config.n_layers, self.config.dim, self.length)
            - 2.0 * frozen
        )

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        return model(batch.tokens, batch.labels, batch.documents)


def prepare_documents(run: RunConfig, folder: Path, digests: FileDigests = NOT_SHARED) -> None:
    """For rank 0: prepare the tokenizer and the token streams of the run's documents."""
    inside = not (folder / "data" / MANIFEST).exists() and held_inside(run.data)
    if inside:
        log.info(
            "too few documents to hold out whole ones: a share of %g of each goes to validation and to test",
            run.data.held_out_share,
        )
    tokenizer = tokenizer_of(
        run, folder, (d.text for split, d in documents(run.data, inside) if split == "train")
    )
    samples = data.document_samples(tokenizer, documents(run.data, inside))
    data.prepare(run, folder / "data", tokenizer, samples, Counter(), digests)


def prepare_chats(run: RunConfig, folder: Path, digests: FileDigests = NOT_SHARED) -> None:
    """For rank 0: prepare the tokenizer and the token streams of the run's chats."""
    texts = (
        m.get("content") or ""
        for split, chat in chats(run.data, Counter())
        if split == "train"
        for m in chat.messages
    )
    tokenizer = with_template(tokenizer_of(run, folder, texts), folder / TOKENIZER)
    dropped: Counter[str] = Counter()
    data.prepare(
        run,
        folder / "data",
        tokenizer,
        chat_samples(tokenizer, run.data, run.batch.seq_len, dropped),
        dropped,
        digests,
    )
    renderer.close()


def tokenizer_of(run: RunConfig, folder: Path, texts: Iterable[str]) -> ChatTokenizer:
    """For rank 0: write the tokenizer of llama.init_from, or one trained on `texts`; return it."""
    start = (
        open_weights(Path(run.llama.init_from), backend=run.llama.backend)
        if run.llama.init_from
        else None
    )
    if not (folder / "data" / MANIFEST).exists():
        refuse_long_rows(run, start.config if start else LLAMA_CONFIGS[run.llama.size])
        if start:
            copy_files(start.companions, folder / TOKENIZER)
        else:
            data.train_tokenizer(run.tokenizer, texts, folder / TOKENIZER)
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, start.hf_config if start else {})
    largest = max(tokenizer.inner.get_vocab(with_added_tokens=True).values())
    if start and largest >= start.config.vocab_size:
        what = f"the tokenizer has ids up to {largest:,}, the embedding of the model {start.config.vocab_size:,} rows"
        hint = "resize it with transformers (model.resize_token_embeddings, save_pretrained), or remove the added tokens"
        raise DataError(what, f"{start.folder}; llama.init_from", hint)
    return tokenizer


def refuse_long_rows(run: RunConfig, config: LlamaConfig | TransformersConfig) -> None:
    """ConfigError: a row has more tokens than the model has positions."""
    length, limit = run.batch.seq_len, run.llama.max_seq_len or config.max_seq_len
    if not limit or length <= limit:
        return
    what = f"batch.seq_len={length:,} is above the {limit:,} positions of the model"
    hint = f"try batch.seq_len={limit}"
    if isinstance(config, LlamaConfig):
        hint += f", or llama.max_seq_len={length} to train the model for longer rows"
    elif config.following_ropes:
        what = f"batch.seq_len={length:,}: {limit_of_ropes(config.following_ropes, limit)}"
        hint += ', or a rope_type that scales all rows alike, such as "yarn" or "linear"'
    where = (
        f"llama.init_from={run.llama.init_from}"
        if run.llama.init_from
        else f"llama.size={run.llama.size}"
    )
    raise ConfigError(what, where, hint)


def with_template(tokenizer: ChatTokenizer, folder: Path) -> ChatTokenizer:
    """Return the tokenizer with a chat template: the one it has, or Llama 3's if it has those
    tokens. DataError otherwise."""
    if tokenizer.template:
        return tokenizer
    ids = {token: tokenizer.inner.token_to_id(token) for token in CHAT_SPECIALS}
    if missing := [token for token, number in ids.items() if number is None]:
        what = f"the tokenizer has no chat template, and lacks {', '.join(missing)}, which Llama 3's template needs"
        raise DataError(
            what,
            str(tokenizer.folder),
            "add a chat_template.jinja that uses its own tokens beside it",
        )
    eos_ids = [*sorted(tokenizer.eos_ids), ids[CHAT_SPECIALS[-1]]]
    write_json(
        folder / "generation_config.json",
        optional_json(folder / "generation_config.json") | {"eos_token_id": eos_ids},
    )
    write_atomic(folder / "chat_template.jinja", CHAT_TEMPLATE)
    return ChatTokenizer.load(folder, {})


BATCH_TOKENS = 4096  # positions scored per batch
CHATS_PER_BATCH = 32
Row = tuple[Ints, Ints, Ints]  # tokens, labels, documents


@dataclass(frozen=True)
class LlamaEvaluator:
    run: RunConfig
    folder: Path
    data: PreparedText

    @property
    def next_command(self) -> str:
        if self.run.llama.backend == "transformers":
            return f"lockstep checkpoint export {self.folder} --out HF-FOLDER"
        how = '"QUESTION" --chat' if self.run.task == "sft" else '"TEXT"'
        return f"lockstep generate {self.folder} {how}"

    def held_out(self, split: Split) -> int:
        return len(getattr(self.data, split))

    def load(self, step: int, spec: EvalSpec, device: torch.device) -> LoadedLlama:
        if spec.average or spec.beams != 1:
            what = f"a Llama is scored at one step and greedily, not with average={spec.average}, beams={spec.beams}"
            raise UsageError(what, "command line, evaluate.beams", "remove both")
        return load_llama(self.folder, step, device=device)

    def evaluate(
        self,
        loaded: LoadedLlama,
        spec: EvalSpec,
        runtime: ElasticRuntime,
        stopped: Callable[[], str],
        *,
        limit: int = 0,
    ) -> EvalResult | None:
        start_s = time.monotonic()
        stream: TokenStream = getattr(self.data, spec.split)
        device, length = next(loaded.model.parameters()).device, self.run.batch.seq_len
        rows = HeldOutRows(stream, length, packed=self.run.task == "sft")
        batches = in_groups(rows, max(1, BATCH_TOKENS // length), kind=lambda row: len(row[0]))
        losses = {
            number: loss_of(loaded.model, batch, device)
            for number, batch in batches_of_rank(batches, runtime, stopped)
        }
        chats = self.data.records(spec.split) if self.run.task == "sft" else []
        chosen = chats[:limit] if limit else chats
        questions = [last_answer(self.data.tokenizer, chat) for chat in chosen]
        renderer.close()
        answers = (
            generate_answers(loaded, self.data.tokenizer, questions, runtime, stopped)
            if chosen
            else {}
        )
        results = merge_results(runtime, stopped, losses=losses, answers=answers)
        if results is None:
            return None
        sums = list(results["losses"].values())  # (nats, tokens) of each batch
        record = loss_record(
            spec, loaded.steps, (nats for nats, _ in sums), sum(tokens for _, tokens in sums)
        )
        samples: list[str] = []
        if self.run.task == "sft":
            texts = results["answers"]
            references = [answer_text(self.data.tokenizer, *question) for question in questions]
            matches = sum(texts[i] == text for i, text in enumerate(references))
            record |= {"chats": len(chosen), "exact_match": matches / max(1, len(references))}
            samples = list(format_samples(chosen, texts, references))
        else:
            size = self.data.bytes[spec.split]
            nats = math.fsum(nats for nats, _ in sums)
            record |= {"bytes": size, "bits_per_byte": nats / math.log(2) / size}
        record["seconds"] = round(time.monotonic() - start_s, 3)
        return EvalResult(record, samples, complete=len(chosen) == len(chats))

    def summary(self, record: dict[str, Any]) -> str:
        head = f"step {record['step']:,}  loss {record['loss']:.4f}  perplexity {record['perplexity']:.2f}"
        if "exact_match" in record:
            return f"{head}  exact {record['exact_match']:.1%}  ({record['split']}, {format_count(record['chats'])} chats, greedy)"
        return f"{head}  {record['bits_per_byte']:.4f} bits a byte  ({record['split']}, {format_count(record['bytes'])} bytes)"


class HeldOutRows:
    """The rows in which a split is scored: chats packed, documents in windows, each half a row after
    the previous one. Each token is scored once, in a window with at least half a row of context;
    tokens that were scored before have the label IGNORE_INDEX."""

    def __init__(self, stream: TokenStream, length: int, *, packed: bool) -> None:
        self.stream = stream
        self.length = length
        index = pack_rows(stream, length, seed=0) if packed else None
        self.packed = None if index is None else PackedRows(stream, length, index)
        self.starts = [] if packed else window_starts(stream.tokens, length)

    def __len__(self) -> int:
        return len(self.starts if self.packed is None else self.packed)

    def __getitem__(self, i: int) -> Row:
        if self.packed is not None:
            return self.packed.row(i)
        start = self.starts[i]
        tokens, labels, documents = window(self.stream, start, self.length)
        if i:
            scored = min(self.starts[i - 1] + self.length, self.stream.tokens)
            labels[: scored - start] = IGNORE_INDEX
        return tokens, labels, documents

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def in_batches(self, rows: int) -> list[list[int]]:
        """Return the numbers of the rows, in batches of at most `rows` rows of one length."""

        def length_of(i: int) -> int:
            return self.length if self.packed else self.stream.tokens - self.starts[i]

        numbers = range(len(self))
        return list(in_groups(numbers, rows, kind=lambda i: min(self.length, length_of(i))))


def window_starts(tokens: int, length: int) -> list[int]:
    """Return the first position of each window over a stream of `tokens` tokens."""
    starts: list[int] = []
    scored = 0  # end of the positions that are already scored
    for start in range(0, max(1, tokens - 1), length - length // 2):
        end = min(start + length, tokens)
        if end <= scored:
            break
        starts.append(start)
        scored = end
    return starts


@torch.no_grad()
def loss_of(
    model: Callable[..., Tensor], rows: list[Row], device: torch.device
) -> tuple[float, int]:
    """Return (sum of -log p over the labels that are not ignored, their number)."""
    batch = batch_of(rows, device)
    nats = model(batch.tokens, batch.labels, batch.documents) if batch.count else 0.0
    return float(nats), batch.count


def generate_answers(
    loaded: LoadedLlama,
    tokenizer: ChatTokenizer,
    questions: Sequence[tuple[list[int], list[int]]],
    runtime: ElasticRuntime,
    stopped: Callable[[], str],
) -> dict[int, str]:
    """Return this rank's greedy answers by number. `questions`: (prompt, reference answer)."""
    order = sorted(range(len(questions)), key=lambda i: (len(questions[i][0]), i))
    answers: dict[int, str] = {}
    decoder = Decoder(loaded.model) if isinstance(loaded.model, Llama) else None
    for _, batch in batches_of_rank(
        in_groups(order, CHATS_PER_BATCH if decoder else 1), runtime, stopped
    ):
        texts = ["" for _ in batch]
        tokens = (
            max(len(questions[i][1]) for i in batch) + 8
        )  # a longer answer cannot match the reference
        prompts = [questions[i][0] for i in batch]
        if decoder:
            drawn = sample_tokens(decoder, prompts, tokens=tokens)
        else:
            drawn = draw_greedily(cast(TransformersModel, loaded.model), prompts[0], tokens)
        for row, text in stream_continuations(tokenizer, prompts, drawn):
            texts[row] += text
        answers |= dict(zip(batch, texts, strict=True))
    return answers


@torch.inference_mode()
def draw_greedily(
    model: TransformersModel, prompt: Sequence[int], tokens: int
) -> Iterator[list[int]]:
    """Yield the next id of one prompt, computed without a cache: for a model without a Decoder.

    At the last position of the model the answer ends.
    """
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    for _ in range(tokens):
        if model.max_seq_len and ids.shape[1] > model.max_seq_len:
            return
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(dim=-1)], dim=1)
        yield [int(ids[0, -1])]


def answer_text(tokenizer: ChatTokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Decode an answer as if the model had generated these ids."""
    text = TextStream(tokenizer, prompt[-CONTEXT_TOKENS:])
    return "".join([*map(text.add, answer), text.close()])


def format_samples(
    chats: Sequence[dict[str, Any]],
    texts: dict[int, str],
    references: Sequence[str],
    count: int = 6,
) -> Iterator[str]:
    """Yield lines with `count` evenly spaced answers, and the reference where it differs."""
    for i in range(0, len(chats), max(1, -(-len(chats) // count))):
        yield ""
        yield f"  {chats[i]['messages'][-2]['content'] if len(chats[i]['messages']) > 1 else ''}"
        text, reference = texts[i], references[i]
        show = (
            repr if text.strip() == reference.strip() and text != reference else str.strip
        )  # repr shows spaces that differ
        yield f"  > {show(text)}" + (
            "" if text == reference else f"   (reference: {show(reference)})"
        )
