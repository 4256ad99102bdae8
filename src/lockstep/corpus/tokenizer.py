"""Tokenizers: one vocabulary for both languages, stored as a `tokenizer.json` (Hugging Face).

bpe   Byte-level byte-pair encoding: decoding restores every text unchanged. A word includes the
      space before it, also at the start of a sentence, so a word has the same tokens everywhere.
      Digits are separate tokens: an unseen number consists of known digits.
word  One token per word or run of punctuation. Rare and new words become [UNKNOWN].

The four special ids never come from text: "[PAD]" typed by a user is five characters, not the id 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lockstep.errors import DataError
from lockstep.files import read_text, write_atomic, write_json

PAD = 0
BEGIN = 1
END = 2
UNKNOWN = 3
SPECIALS = ["[PAD]", "[BEGIN]", "[END]", "[UNKNOWN]"]

# GPT-2's pre-tokenizer (openai/gpt-2 encoder.py), without English contractions, with single digits,
# and with combining marks kept on their letters.
WORDS = r" ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3's pre-tokenizer, with single digits; a line break includes the next line's indentation.
WORDS_OF_DOCUMENTS = (
    r"[^\s\p{L}\p{N}]?[\p{L}\p{M}]+| [\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n][^\S\r\n]*|\s+(?!\S)|\s+"
)
# The chat tokens of Llama 3: a pre-trained model can be fine-tuned on chats without new tokens.
CHAT_SPECIALS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Characters of a word that merges are learned from: a merge rescans all words that contain it.
MAX_WORD = 1_000
LONG_WORD = re.compile(rf"\S{{{MAX_WORD},}}|\s{{{MAX_WORD},}}")


class Tokenizer:
    """A trained, immutable tokenizer. Create it with `train` or `load`."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        # Not saved by the library: the name of a special token in a text is ordinary text.
        self._inner.encode_special_tokens = True
        self._joins_words = isinstance(inner.model, models.BPE)
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        kind: Literal["bpe", "word"],
        vocab_size: int,
        min_frequency: int,
        lowercase: bool,
    ) -> Tokenizer:
        """Train a tokenizer of at most `vocab_size` entries, with merges or words that occur at
        least `min_frequency` times. It depends neither on the order of the texts nor on threads."""
        lower = [normalizers.Lowercase()] if lowercase else []
        sizes = {"vocab_size": vocab_size, "min_frequency": min_frequency}
        if kind == "bpe":
            inner = byte_level_bpe(WORDS)
            inner.normalizer = normalizers.Sequence([*lower, normalizers.Prepend(" ")])
            train_bpe(inner, texts, WORDS, special_tokens=SPECIALS, **sizes)
        else:
            inner = tokenizers.Tokenizer(models.WordLevel(unk_token=SPECIALS[UNKNOWN]))
            inner.normalizer = normalizers.Sequence(lower)
            inner.pre_tokenizer = pre_tokenizers.Whitespace()
            trainer = trainers.WordLevelTrainer(
                special_tokens=SPECIALS, show_progress=False, **sizes
            )
            inner.train_from_iterator(truncate_words(texts, WORDS), trainer)
        return cls(inner)

    @classmethod
    def train_on_documents(
        cls, texts: Iterable[str], *, vocab_size: int, min_frequency: int
    ) -> Tokenizer:
        """Train a tokenizer for a Llama: byte-level BPE that keeps every byte and adds none. Of its
        `vocab_size` entries, 4 are special tokens, 3 chat tokens and 256 bytes."""
        inner = byte_level_bpe(WORDS_OF_DOCUMENTS)
        inner.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[BEGIN]} $A", special_tokens=[(SPECIALS[BEGIN], BEGIN)]
        )
        train_bpe(
            inner,
            texts,
            WORDS_OF_DOCUMENTS,
            special_tokens=[*SPECIALS, *CHAT_SPECIALS],
            vocab_size=vocab_size,
            min_frequency=min_frequency,
        )
        return cls(inner)

    def save_for_llama(self, folder: Path) -> None:
        """Write the tokenizer files of a Hugging Face folder, with chat template and eos ids."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / "tokenizer.json")
        tokens = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[BEGIN],
            "eos_token": SPECIALS[END],
            "pad_token": SPECIALS[PAD],
        }
        write_json(folder / "tokenizer_config.json", tokens)
        write_atomic(folder / "chat_template.jinja", CHAT_TEMPLATE)
        eos_ids = [END, self._inner.token_to_id(CHAT_SPECIALS[-1])]
        write_json(
            folder / "generation_config.json",
            {"bos_token_id": BEGIN, "eos_token_id": eos_ids, "pad_token_id": PAD},
        )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load a tokenizer. DataError if it is missing, damaged, or has other special tokens."""
        inner = read_tokenizer(path, "was this run prepared?")
        first = [inner.id_to_token(i) for i in range(len(SPECIALS))]
        if first != SPECIALS:
            raise DataError(
                f"the tokenizer's first four tokens are {first}, not {SPECIALS}", str(path)
            )
        return cls(inner)

    def save(self, path: Path) -> None:
        write_atomic(path, self._inner.to_str(pretty=False))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without BEGIN and END."""
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, rows: list[list[int]]) -> list[str]:
        """Return the text of each row, without PAD, BEGIN and END. [UNKNOWN] is kept."""
        texts = self._inner.decode_batch(
            [[i for i in row if i > END] for row in rows], skip_special_tokens=False
        )
        return [text.removeprefix(" ") for text in texts] if self._joins_words else texts


def read_tokenizer(path: Path, hint: str) -> tokenizers.Tokenizer:
    """Read a tokenizer.json. DataError if it is damaged or missing, then with `hint`."""
    try:
        return tokenizers.Tokenizer.from_str(read_text(path))
    except FileNotFoundError:
        raise DataError(f"there is no {path.name}", str(path.parent), hint) from None
    except Exception as error:  # the library raises plain Exception for any error
        raise DataError(
            f"the tokenizer cannot be read: {error}", str(path), "copy the file again"
        ) from error


def byte_level_bpe(words: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_bpe(
    tokenizer: tokenizers.Tokenizer, texts: Iterable[str], words: str, **options: Any
) -> None:
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, **options
    )
    tokenizer.train_from_iterator(truncate_words(texts, words), trainer)


def truncate_words(texts: Iterable[str], words: str) -> Iterator[str]:
    """Yield the texts with words cut to MAX_WORD characters."""
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    for text in texts:
        if LONG_WORD.search(text):
            text = "".join(piece[:MAX_WORD] for piece, _ in split.pre_tokenize_str(text))
        yield text
