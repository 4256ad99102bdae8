"""Training of a Llama, and the evaluation of its checkpoints.

Pre-training (or continued pre-training) cuts concatenated documents into rows; supervised
fine-tuning packs whole chats into rows, and its loss covers the answers only. Scores: nats per
token, bits per byte; for chats, exact match of answers.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import state_dict
from lockstep.config.schema import RunConfig
from lockstep.corpus import prepared as data
from lockstep.corpus.chat_template import renderer
from lockstep.corpus.chat_tokenizer import ChatTokenizer, optional_json
from lockstep.corpus.chats import chat_samples, chats, last_answer
from lockstep.corpus.documents import documents, held_inside, in_groups
from lockstep.corpus.loaders import (
    CutRows,
    DocumentRows,
    HeldOutBatches,
    PackedRows,
    RowLoader,
    TextBatch,
    WindowRows,
    pack_rows,
    save_packed_rows,
)
from lockstep.corpus.prepared import PreparedText
from lockstep.corpus.token_stream import TokenStream
from lockstep.corpus.tokenizer import CHAT_SPECIALS, CHAT_TEMPLATE
from lockstep.data.manifest import (
    MANIFEST,
    NOT_SHARED,
    FileDigests,
    verify_files,
    write_manifest,
)
from lockstep.data.order import UniformOrder
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_in_run_folder
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.files import sha256_file, write_atomic, write_json
from lockstep.generation.decoder import Decoder
from lockstep.generation.sampling import (
    CONTEXT_TOKENS,
    TextStream,
    sample_tokens,
    stream_continuations,
)
from lockstep.log import announcing, log
from lockstep.models.hub import LlamaWeights, copy_files
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
from lockstep.models.transformers_model import ModelConfig, TransformersModel, limit_of_ropes
from lockstep.record.step_timer import flops_per_token
from lockstep.tasks.evaluator import EvalSpec, Evaluator, Split, TextGeneration
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
        hashing = runtime.preparing("hashing the initial weights")
        start = run_in_run_folder(
            runtime, lambda: hashing(write_model_json)(initial_weights, folder)
        )
        fingerprints = prepared.fingerprints | {"start": start}
        if initial_weights.adapter:
            fingerprints["adapter"] = state_dict.digest(initial_weights.adapter)
        if run.llama.backend == "transformers":
            fingerprints["transformers"] = version("transformers")  # it holds the model's code
        assert_equal_on_all_ranks(runtime, fingerprints)
        length, stream = run.batch.seq_len, prepared.train
        rows: CutRows | PackedRows | DocumentRows = CutRows(stream, length)
        if not run.data.packing:
            rows = DocumentRows(stream, length)
        elif run.task == "sft":
            arguments = folder / "data", stream, length, run.seed, fingerprints["data"]
            packing = runtime.preparing("packing the chats into rows")
            name, digest = run_in_run_folder(runtime, lambda: packing(save_packed_rows)(*arguments))
            path = folder / "data" / name
            verify_files({path: digest}, path.with_suffix(".json"), digests)
            rows = PackedRows(stream, length, np.asarray(np.load(path, mmap_mode="r")))
        refuse_no_rows(rows, folder)
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


def refuse_no_rows(rows: CutRows | PackedRows | DocumentRows, folder: Path) -> None:
    """DataError: nothing can be trained."""
    if len(rows):
        return
    if isinstance(rows, CutRows):
        raise DataError(
            f"the training text has fewer than {rows.length} tokens, one row",
            f"{folder / 'data'}; batch.seq_len",
            "lower it",
        )
    raise DataError(
        "no training document or chat has two tokens: one to read and one to predict",
        f"{folder / 'data'}; data.train",
        "give longer documents",
    )


def prepare_documents(run: RunConfig, folder: Path, digests: FileDigests = NOT_SHARED) -> None:
    """For rank 0: prepare the tokenizer and the token streams of the run's documents."""

    @cache
    def inside() -> bool:
        is_inside = held_inside(run.data)
        if is_inside:
            log.info(
                "too few documents to hold out whole ones: "
                "a share of %g of each goes to validation and to test",
                run.data.held_out_share,
            )
        return is_inside

    def texts() -> Iterator[str]:
        return (d.text for split, d in documents(run.data, inside()) if split == "train")

    def samples(tokenizer: ChatTokenizer, _: Counter[str]) -> Iterator[data.Sample]:
        return data.document_samples(tokenizer, documents(run.data, inside()))

    prepare(run, folder, digests, texts, samples)


def prepare_chats(run: RunConfig, folder: Path, digests: FileDigests) -> None:
    """For rank 0: prepare the tokenizer and the token streams of the run's chats."""

    def texts() -> Iterator[str]:
        return (
            m.get("content") or ""
            for split, chat in chats(run.data, Counter())
            if split == "train"
            for m in chat.messages
        )

    def samples(tokenizer: ChatTokenizer, dropped: Counter[str]) -> Iterator[data.Sample]:
        tokenizer = with_template(tokenizer, folder / TOKENIZER)
        return chat_samples(tokenizer, run.data, run.batch.seq_len, dropped)

    prepare(run, folder, digests, texts, samples)
    renderer.close()


def prepare(
    run: RunConfig,
    folder: Path,
    digests: FileDigests,
    texts: Callable[[], Iterator[str]],
    samples: Callable[[ChatTokenizer, Counter[str]], Iterator[data.Sample]],
) -> None:
    """For rank 0: prepare tokenizer and streams, unless they are in `folder` or in the cache.

    texts    returns the texts that a tokenizer is trained on
    samples  returns the samples, given the tokenizer; it counts what it drops
    """
    start = None
    if run.llama.init_from:
        start = open_weights(Path(run.llama.init_from), backend=run.llama.backend)
    model: dict[str, Any] = {}
    if not (folder / "data" / MANIFEST).exists():
        refuse_long_rows(run, start.config if start else LLAMA_CONFIGS[run.llama.size])
        if start:  # tensors that do not fit are refused before the work
            next(iter(start.tensors.values()))
            start.release()
        # A failed attempt may have left the files of another tokenizer.
        shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
        if start:
            copy_files(start.companions, folder / TOKENIZER)
            names = [path.name for path in start.companions]
            files = {name: sha256_file(folder / TOKENIZER / name) for name in names}
            model = {"files": files, "config": start.hf_config}
    settings = data.settings_of(run)
    folders = {"tokenizer": folder / TOKENIZER, "data": folder / "data"}

    def write() -> list[Path]:
        if not start:
            data.train_tokenizer(run.tokenizer, texts(), folder / TOKENIZER)
        tokenizer = tokenizer_of(folder, start)
        dropped: Counter[str] = Counter()
        with announcing(f"encoding the {'chats' if run.task == 'sft' else 'documents'}"):
            files, report = data.write_samples(
                folders["data"],
                samples(tokenizer, dropped),
                tokenizer.inner.get_vocab_size(with_added_tokens=True),
                has_loss_mask=run.task == "sft",
            )
        data.refuse_empty_split(run, report, dropped)
        report["left_out"] = dropped
        data.log_report(report)
        facts = {
            "tokenizer": sha256_file(tokenizer.folder / "tokenizer.json"),
            "asked": settings,
            "report": report,
        }
        manifest = write_manifest(folders["data"], files, digests, **facts)
        return [*sorted(tokenizer.folder.iterdir()), *files, manifest]

    report = data.prepare_once(folders, run.data, settings, write, digests, model=model)
    if report:
        data.log_report(report)
    tokenizer_of(folder, start)


def tokenizer_of(folder: Path, start: LlamaWeights | None) -> ChatTokenizer:
    """Load the tokenizer of a run. DataError: it has more ids than the model."""
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, start.hf_config if start else {})
    largest = max(tokenizer.inner.get_vocab(with_added_tokens=True).values())
    if start and largest >= start.config.vocab_size:
        rows = f"the embedding of the model {start.config.vocab_size:,} rows"
        raise DataError(
            f"the tokenizer has ids up to {largest:,}, {rows}",
            f"{start.folder}; llama.init_from",
            "resize it with transformers (model.resize_token_embeddings, save_pretrained), or "
            "remove the added tokens",
        )
    return tokenizer


def refuse_long_rows(run: RunConfig, config: ModelConfig) -> None:
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
    raise ConfigError(
        what,
        f"llama.init_from={run.llama.init_from}"
        if run.llama.init_from
        else f"llama.size={run.llama.size}",
        hint,
    )


def with_template(tokenizer: ChatTokenizer, folder: Path) -> ChatTokenizer:
    """Return the tokenizer with a chat template: the one it has, or Llama 3's if it has those
    tokens. DataError otherwise."""
    if tokenizer.template:
        return tokenizer
    ids = {token: tokenizer.inner.token_to_id(token) for token in CHAT_SPECIALS}
    if missing := [token for token, number in ids.items() if number is None]:
        raise DataError(
            f"the tokenizer has no chat template, and lacks {', '.join(missing)}, "
            "which Llama 3's template needs",
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


def held_out_rows(run: RunConfig, stream: TokenStream) -> PackedRows | WindowRows | DocumentRows:
    """Return the rows in which a split is scored: chats packed, documents in windows."""
    length = run.batch.seq_len
    if not run.data.packing:
        return DocumentRows(stream, length)
    if run.task == "sft":
        return PackedRows(stream, length, pack_rows(stream, length, seed=0))
    return WindowRows(stream, length)


BATCH_TOKENS = 4096  # positions scored per batch
CHATS_PER_BATCH = 32


@dataclass(frozen=True)
class LlamaEvaluator(Evaluator):
    data: PreparedText

    @property
    def next_command(self) -> str:
        if self.run.llama.backend == "transformers":
            return f"lockstep checkpoint export {self.folder} --out HF-FOLDER"
        how = '"QUESTION" --chat' if self.run.task == "sft" else '"TEXT"'
        return f"lockstep generate {self.folder} {how}"

    def load(self, step: int, spec: EvalSpec, device: torch.device) -> LoadedLlama:
        if spec.average or spec.beams != 1:
            raise UsageError(
                "a Llama is scored at one step and greedily, "
                f"not with average={spec.average}, beams={spec.beams}",
                "command line, evaluate.beams",
                "remove both",
            )
        return load_llama(self.folder, step, device=device)

    def losses(
        self, loaded: LoadedLlama, split: Split
    ) -> Iterator[Callable[[], tuple[float, int]]]:
        length = self.run.batch.seq_len
        rows = held_out_rows(self.run, getattr(self.data, split))
        device = next(loaded.model.parameters()).device
        batches = HeldOutBatches(rows, max(1, BATCH_TOKENS // length), device)

        def loss(number: int) -> tuple[float, int]:
            return loss_of(loaded.model, batches[number])

        return (partial(loss, number) for number in range(len(batches)))

    def generation(
        self, loaded: LoadedLlama, spec: EvalSpec, chosen: list[dict[str, Any]]
    ) -> TextGeneration:
        """Return how to answer greedily."""
        tokenizer, model = self.data.tokenizer, loaded.model
        questions = [last_answer(tokenizer, chat) for chat in chosen]  # prompt, reference answer
        renderer.close()
        order = sorted(range(len(questions)), key=lambda i: (len(questions[i][0]), i))
        decoder = Decoder(model) if isinstance(model, Llama) and chosen else None

        def answer(numbers: list[int]) -> list[str]:
            texts = ["" for _ in numbers]
            # A longer answer cannot match the reference.
            tokens = max(len(questions[i][1]) for i in numbers) + 8
            prompts = [questions[i][0] for i in numbers]
            if isinstance(model, TransformersModel):
                drawn = draw_greedily(model, prompts[0], tokens)
            else:
                assert decoder is not None
                drawn = sample_tokens(decoder, prompts, tokens=tokens)
            for row, text in stream_continuations(tokenizer, prompts, drawn):
                texts[row] += text
            return texts

        references = [answer_text(tokenizer, *question) for question in questions]
        return TextGeneration(
            references, in_groups(order, CHATS_PER_BATCH if decoder else 1), answer
        )

    def scores(
        self, spec: EvalSpec, nats: float, texts: Sequence[str], references: Sequence[str]
    ) -> dict[str, Any]:
        if self.run.task == "sft":
            matches = sum(a == b for a, b in zip(texts, references, strict=True))
            return {"chats": len(texts), "exact_match": matches / max(1, len(texts))}
        size = self.data.report[spec.split]["bytes"]
        return {"bytes": size, "bits_per_byte": nats / math.log(2) / size}

    def sample(self, record: dict[str, Any], text: str, reference: str) -> Iterator[str]:
        messages = record["messages"]
        yield f"  {messages[-2]['content'] if len(messages) > 1 else ''}"
        differs_in_spaces = text != reference and text.strip() == reference.strip()
        show = repr if differs_in_spaces else str.strip
        line = f"  > {show(text)}"
        yield line if text == reference else f"{line}   (reference: {show(reference)})"

    def summary(self, record: dict[str, Any]) -> str:
        line = f"step {record['step']:,}  loss {record['loss']:.4f}"
        line += f"  perplexity {record['perplexity']:.2f}"
        if "exact_match" in record:
            size = f"{format_count(record['chats'])} chats, greedy"
            return f"{line}  exact {record['exact_match']:.1%}  ({record['split']}, {size})"
        size = f"{format_count(record['bytes'])} bytes"
        return f"{line}  {record['bits_per_byte']:.4f} bits a byte  ({record['split']}, {size})"


@torch.no_grad()
def loss_of(model: Callable[..., Tensor], batch: TextBatch) -> tuple[float, int]:
    """Return (sum of -log p over the labels that are not ignored, their number)."""
    if not batch.count:
        return 0.0, 0
    return float(model(batch.tokens, batch.labels, batch.documents)), batch.count


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
