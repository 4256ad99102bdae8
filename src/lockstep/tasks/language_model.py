"""Training of a Llama. Pre-training (or continued pre-training) cuts concatenated documents into
rows; supervised fine-tuning packs whole chats into rows, and its loss covers the answers only."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from lockstep.checkpoint import state_dict
from lockstep.config.schema import RunConfig
from lockstep.data.manifest import MANIFEST, NOT_SHARED, FileDigests, verify_files
from lockstep.data.order import UniformOrder
from lockstep.data.text import prepare as data
from lockstep.data.text.chat_samples import chat_samples, chats
from lockstep.data.text.chat_template import renderer
from lockstep.data.text.chat_tokenizer import ChatTokenizer, optional_json
from lockstep.data.text.documents import documents, held_inside
from lockstep.data.text.packing import CutRows, PackedRows, RowLoader, save_packed_rows
from lockstep.data.text.token_stream import TokenStream
from lockstep.data.tokenizer import CHAT_SPECIALS, CHAT_TEMPLATE
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_on_rank0
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DataError
from lockstep.files import write_atomic, write_json
from lockstep.log import log
from lockstep.models.initial_weights import InitialWeights, write_model_json
from lockstep.models.llama_io import TOKENIZER, open_weights
from lockstep.record.step_timer import flops_per_token


@dataclass(frozen=True)
class LanguageModelTask(InitialWeights):
    """A Llama and its rows: the members of `TranslationTask`, those of the model inherited."""

    loader: RowLoader
    validation: TokenStream
    fingerprints: Mapping[str, str]

    @classmethod
    def open(cls, run: RunConfig, folder: Path, runtime: ElasticRuntime, digests: FileDigests) -> Self:
        """Collective. Return the task over the rows of prepared data; rank 0 prepares it."""
        prepare = prepare_chats if run.task == "sft" else prepare_documents
        preparing = runtime.board.during("preparing")
        run_on_rank0(runtime, lambda: preparing(prepare)(run, folder, digests))
        tokenizer = ChatTokenizer.load(folder / TOKENIZER, {})
        prepared = preparing(data.open_prepared)(folder / "data", tokenizer, digests)
        initial_weights = InitialWeights.of(run, tokenizer.inner.get_vocab_size(with_added_tokens=True))
        start = run_on_rank0(runtime, lambda: preparing(write_model_json)(initial_weights, folder))
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
            name, digest = run_on_rank0(runtime, lambda: preparing(save_packed_rows)(*arguments))
            path = folder / "data" / name
            verify_files({path: digest}, path.with_suffix(".json"), digests)
            rows = PackedRows(stream, length, np.asarray(np.load(path, mmap_mode="r")))
        if not len(rows):
            what = f"the training text has fewer than {length} tokens, one row"
            raise DataError(what, f"{folder / 'data'}; batch.seq_len", "lower it")
        k = run.batch.micro_batches
        order = UniformOrder(len(rows), k * (run.batch.tokens // length), k, run.seed)
        loader = RowLoader(rows, order, runtime.world.device)
        return cls(**vars(initial_weights), loader=loader, validation=prepared.validation, fingerprints=fingerprints)

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
        return flops_per_token(total, self.config.n_layers, self.config.dim, self.length) - 2.0 * frozen

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        return model(batch.tokens, batch.labels, batch.documents)


def prepare_documents(run: RunConfig, folder: Path, digests: FileDigests = NOT_SHARED) -> None:
    """For rank 0: prepare the tokenizer and the token streams of the run's documents."""
    inside = not (folder / "data" / MANIFEST).exists() and held_inside(run.data)
    if inside:
        log.info("too few documents to hold out whole ones: a share of %g of each goes to validation and to test", run.data.held_out_share)
    tokenizer = tokenizer_of(run, folder, (d.text for split, d in documents(run.data, inside) if split == "train"))
    samples = data.document_samples(tokenizer, documents(run.data, inside))
    data.prepare(run, folder / "data", tokenizer, samples, Counter(), digests)


def prepare_chats(run: RunConfig, folder: Path, digests: FileDigests = NOT_SHARED) -> None:
    """For rank 0: prepare the tokenizer and the token streams of the run's chats."""
    texts = (m.get("content") or "" for split, chat in chats(run.data, Counter()) if split == "train" for m in chat.messages)
    tokenizer = with_template(tokenizer_of(run, folder, texts), folder / TOKENIZER)
    dropped: Counter[str] = Counter()
    data.prepare(run, folder / "data", tokenizer, chat_samples(tokenizer, run.data, run.batch.seq_len, dropped), dropped, digests)
    renderer.close()


def tokenizer_of(run: RunConfig, folder: Path, texts: Iterable[str]) -> ChatTokenizer:
    """For rank 0: write the tokenizer of llama.init_from, or one trained on `texts`; return it."""
    start = open_weights(Path(run.llama.init_from), backend=run.llama.backend) if run.llama.init_from else None
    if not (folder / "data" / MANIFEST).exists():
        if start:
            (folder / TOKENIZER).mkdir(parents=True, exist_ok=True)
            for path in start.companions:
                shutil.copyfile(path, folder / TOKENIZER / path.name)
        else:
            data.train_tokenizer(run.tokenizer, texts, folder / TOKENIZER)
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, start.hf_config if start else {})
    largest = max(tokenizer.inner.get_vocab(with_added_tokens=True).values())
    if start and largest >= start.config.vocab_size:
        what = f"the tokenizer has ids up to {largest:,}, the embedding of the model {start.config.vocab_size:,} rows"
        hint = "resize it with transformers (model.resize_token_embeddings, save_pretrained), or remove the added tokens"
        raise DataError(what, f"{start.folder}; llama.init_from", hint)
    return tokenizer


def with_template(tokenizer: ChatTokenizer, folder: Path) -> ChatTokenizer:
    """Return the tokenizer with a chat template: the one it has, or Llama 3's if it has those
    tokens. DataError otherwise."""
    if tokenizer.template:
        return tokenizer
    ids = {token: tokenizer.inner.token_to_id(token) for token in CHAT_SPECIALS}
    if missing := [token for token, number in ids.items() if number is None]:
        what = f"the tokenizer has no chat template, and lacks {', '.join(missing)}, which Llama 3's template needs"
        raise DataError(what, str(tokenizer.folder), "add a chat_template.jinja that uses its own tokens beside it")
    eos_ids = [*sorted(tokenizer.eos_ids), ids[CHAT_SPECIALS[-1]]]
    write_json(folder / "generation_config.json", optional_json(folder / "generation_config.json") | {"eos_token_id": eos_ids})
    write_atomic(folder / "chat_template.jinja", CHAT_TEMPLATE)
    return ChatTokenizer.load(folder, {})
