"""How good translations are: corpus-level BLEU, chrF, character and word error rate, exact match. Pure functions of two lists of texts."""

from __future__ import annotations

from collections.abc import Sequence

from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

# Languages written without spaces between words, for which BLEU over words means nothing.
UNSPACED = {"zh": "zh", "yue": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}


def score(found: Sequence[str], right: Sequence[str], *, language: str, lowercase: bool = False) -> dict[str, float | str]:
    """The scores of translations `found` against one reference each.

    language   code of the texts' language; it decides how BLEU cuts them into words
    lowercase  compare in lower case
    bleu, chrf             0 to 100, by sacrebleu; their signatures say exactly how
    cer, wer               edits over the whole corpus / characters or words of the references; may exceed 1
    exact_match            share of translations that equal their reference, 0 to 1
    ValueError when the lists differ in length or are empty.
    """
    if len(found) != len(right) or not found:
        raise ValueError(f"{len(found)} translations for {len(right)} references")
    bleu = BLEU(lowercase=lowercase, tokenize=UNSPACED.get(language.split("_")[0].split("-")[0], "13a"))
    chrf = CHRF(lowercase=lowercase)
    scores: dict[str, float | str] = {
        "bleu": bleu.corpus_score(list(found), [list(right)]).score,
        "chrf": chrf.corpus_score(list(found), [list(right)]).score,
    }
    if lowercase:
        found, right = [text.lower() for text in found], [text.lower() for text in right]
    return scores | {
        "cer": error_rate(found, right),
        "wer": error_rate([text.split() for text in found], [text.split() for text in right]),
        "exact_match": sum(a == b for a, b in zip(found, right, strict=True)) / len(right),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def error_rate(found: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> float:
    """Insertions, deletions and substitutions that turn all of `found` into `right`, over the symbols of `right`."""
    edits = sum(Levenshtein.distance(a, b) for a, b in zip(found, right, strict=True))
    return edits / max(1, sum(map(len, right)))
