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
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lockstep.errors import DataError
from lockstep.files import write_atomic

PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 3
SPECIALS = ["[PAD]", "[BEGIN]", "[END]", "[UNKNOWN]"]

# GPT-2's words (openai/gpt-2 encoder.py) without its English contractions, with marks kept on their letters, and digits one by one.
WORDS = r" ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"


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
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer saved at `path`. DataError when it is absent, torn, or has other special tokens than ours."""
        try:
            inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
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
