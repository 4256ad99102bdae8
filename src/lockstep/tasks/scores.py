"""Scores of translations: corpus-level BLEU, chrF, character and word error rate, exact match."""

from __future__ import annotations

from collections.abc import Sequence

from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

# Languages written without spaces between words, and the tokenizer that sacrebleu needs for them.
UNSPACED = {"zh": "zh", "yue": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}


def score(translations: Sequence[str], references: Sequence[str], *, language: str, lowercase: bool = False) -> dict[str, float | str]:
    """Return the scores of translations with one reference each.

    language     code of the target language; selects the tokenizer of BLEU
    bleu, chrf   0 to 100, by sacrebleu; the signatures record its settings
    cer, wer     edits in the corpus / characters or words of the references; may exceed 1
    exact_match  share of translations that equal their reference, 0 to 1
    ValueError if the lists differ in length or are empty.
    """
    if len(translations) != len(references) or not translations:
        raise ValueError(f"{len(translations)} translations for {len(references)} references")
    bleu = BLEU(lowercase=lowercase, tokenize=UNSPACED.get(language.split("_")[0].split("-")[0], "13a"))
    chrf = CHRF(lowercase=lowercase)
    scores: dict[str, float | str] = {
        "bleu": bleu.corpus_score(list(translations), [list(references)]).score,
        "chrf": chrf.corpus_score(list(translations), [list(references)]).score,
    }
    if lowercase:
        translations, references = [text.lower() for text in translations], [text.lower() for text in references]
    return scores | {
        "cer": error_rate(translations, references),
        "wer": error_rate([text.split() for text in translations], [text.split() for text in references]),
        "exact_match": sum(a == b for a, b in zip(translations, references, strict=True)) / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def error_rate(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    edits = sum(Levenshtein.distance(a, b) for a, b in zip(translations, references, strict=True))
    return edits / max(1, sum(map(len, references)))
