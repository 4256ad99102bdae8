"""Text to token ids and back, one vocabulary for both languages, kept as the `tokenizer.json` that Hugging Face `tokenizers` reads.

bpe   byte-level byte-pair encoding: every text can be encoded and decoded again unchanged. A word carries the space before it, also
      the first one of a sentence, so that a word has one token wherever it stands. Digits are tokens of their own: a number the
      model never saw is digits that it knows.
word  one token for a whole word or run of punctuation, as the classic tutorial has it; what is rare or new becomes [UNKNOWN].

The four special ids exist outside the text: "[PAD]" typed by a user is five characters, never the id 0.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lockstep.errors import DataError
from lockstep.files import read_text, write_atomic, write_json

PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 3
SPECIALS = ["[PAD]", "[BEGIN]", "[END]", "[UNKNOWN]"]

# GPT-2's words (openai/gpt-2 encoder.py) without its English contractions, with marks kept on their letters, and digits one by one.
WORDS = r" ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"


# Llama 3's words, with digits one by one, and a line's end together with how far the next line is set in, which code is full of.
WORDS_OF_DOCUMENTS = r"[^\s\p{L}\p{N}]?[\p{L}\p{M}]+| [\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n][^\S\r\n]*|\s+(?!\S)|\s+"
# Who speaks and where they end, as in Llama 3: a model that is pre-trained here can be taught to chat without new words.
CHAT_SPECIALS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

LONGEST_WORD = 1_000  # letters of a word that merges are learned from: each merge looks at the whole of the words that it is in
LONG_RUN = re.compile(rf"\S{{{LONGEST_WORD},}}|\s{{{LONGEST_WORD},}}")


class Tokenizer:
    """A trained tokenizer. Made by `train` or `load`; never changes."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        # The library forgets this when it saves, so it is set on every way in: a special token's name in a text is only text.
        self._inner.encode_special_tokens = True
        self._joins_words = isinstance(inner.model, models.BPE)
        self.size: int = inner.get_vocab_size(with_added_tokens=True)
        canonical = json.dumps(json.loads(inner.to_str()), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    @classmethod
    def train(
        cls, texts: Iterable[str], *, kind: Literal["bpe", "word"], vocabulary: int, min_frequency: int, lowercase: bool
    ) -> Tokenizer:
        """The tokenizer of these texts: the same for the same texts, in whatever order, thread count or process.

        vocabulary      entries at most, the four special ones included; bpe begins with 256 bytes
        min_frequency   merges (bpe) or words (word) that occur less often are not taken
        """
        lower = [normalizers.Lowercase()] if lowercase else []
        if kind == "bpe":
            inner = tokenizers.Tokenizer(models.BPE())
            inner.normalizer = normalizers.Sequence([*lower, normalizers.Prepend(" ")])
            inner.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
            inner.decoder = decoders.ByteLevel()
            trainer: trainers.Trainer = trainers.BpeTrainer(
                vocab_size=vocabulary,
                min_frequency=min_frequency,
                special_tokens=SPECIALS,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
        else:
            inner = tokenizers.Tokenizer(models.WordLevel(unk_token=SPECIALS[UNKNOWN]))
            inner.normalizer = normalizers.Sequence(lower)
            inner.pre_tokenizer = pre_tokenizers.Whitespace()
            trainer = trainers.WordLevelTrainer(
                vocab_size=vocabulary, min_frequency=min_frequency, special_tokens=SPECIALS, show_progress=False
            )
        inner.train_from_iterator(with_short_words(texts, WORDS), trainer)
        return cls(inner)

    @classmethod
    def train_on_documents(cls, texts: Iterable[str], *, vocabulary: int, min_frequency: int) -> Tokenizer:
        """The tokenizer of a Llama for these texts: byte-level BPE that adds nothing to a text and keeps each byte of it.

        vocabulary  entries at most: the four special ones, those of chats, 256 bytes, then merges
        """
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(WORDS_OF_DOCUMENTS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        begin = SPECIALS[BEGIN]
        inner.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, BEGIN)])
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=min_frequency,
            special_tokens=[*SPECIALS, *CHAT_SPECIALS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(with_short_words(texts, WORDS_OF_DOCUMENTS), trainer)
        return cls(inner)

    def save_for_llama(self, folder: Path) -> None:
        """The files that go with a Llama in a Hugging Face folder: the tokenizer, its chat template, the ids that end an answer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / "tokenizer.json")
        names = {"bos_token": SPECIALS[BEGIN], "eos_token": SPECIALS[END], "pad_token": SPECIALS[PAD]}
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
        write_atomic(folder / "chat_template.jinja", CHAT_TEMPLATE)
        ends = [END, self._inner.token_to_id(CHAT_SPECIALS[-1])]
        write_json(folder / "generation_config.json", {"bos_token_id": BEGIN, "eos_token_id": ends, "pad_token_id": PAD})

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer saved at `path`. DataError when it is absent, torn, or has other special tokens than ours."""
        try:
            inner = tokenizers.Tokenizer.from_str(read_text(path))
        except FileNotFoundError:
            raise DataError(f"there is no tokenizer at {path}", hint="was this run prepared?") from None
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise DataError(f"the tokenizer cannot be read: {error}", str(path)) from error
        found = [inner.id_to_token(i) for i in range(len(SPECIALS))]
        if found != SPECIALS:
            raise DataError(f"the tokenizer's first four tokens are {found}, not {SPECIALS}", str(path))
        return cls(inner)

    def save(self, path: Path) -> None:
        """`tokenizer.json` at `path`, atomically."""
        write_atomic(path, self._inner.to_str(pretty=False))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without BEGIN and END."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, rows: list[list[int]]) -> list[str]:
        """Text of each row, PAD, BEGIN and END left out. [UNKNOWN] stays, so that a hole in a translation shows."""
        texts = self._inner.decode_batch([[i for i in row if i > END] for row in rows], skip_special_tokens=False)
        return [text.removeprefix(" ") for text in texts] if self._joins_words else texts


def with_short_words(texts: Iterable[str], words: str) -> Iterator[str]:
    """The texts, of words of more than LONGEST_WORD letters the beginning alone. `words`: the pattern of the pre-tokenizer."""
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    for text in texts:
        if LONG_RUN.search(text):
            text = "".join(piece[:LONGEST_WORD] for piece, _ in split.pre_tokenize_str(text))
        yield text
