"""Scores of translations, on texts whose scores are known."""

from __future__ import annotations

import pytest

from lockstep.tasks.translation import error_rate, score

REFERENCES = ["the cat sits on the mat", "two dogs run in the park today"]


def test_equal_texts_have_the_best_scores() -> None:
    scores = score(REFERENCES, REFERENCES, language="en")
    assert scores["bleu"] == pytest.approx(100) and scores["chrf"] == pytest.approx(100)
    assert (scores["cer"], scores["wer"], scores["exact_match"]) == (0, 0, 1)


def test_error_rates_count_edits_per_unit_of_the_references() -> None:
    scores = score(
        ["the cat sits on the mat", "two dogs run in the park"], REFERENCES, language="en"
    )
    assert scores["wer"] == pytest.approx(1 / 13) and scores["exact_match"] == 0.5
    assert scores["cer"] == pytest.approx(len(" today") / sum(map(len, REFERENCES)))
    assert error_rate(["abcdef"], ["ab"]) == 2.0, "more edits than the reference has characters"
    assert error_rate(["abc"], [""]) == 3.0


def test_case_counts_unless_lowercase() -> None:
    upper = [text.upper() for text in REFERENCES]
    assert score(upper, REFERENCES, language="en")["exact_match"] == 0
    assert score(upper, REFERENCES, language="en", lowercase=True)["exact_match"] == 1


@pytest.mark.parametrize(
    ("language", "tokenizer"), [("it", "13a"), ("zh_Hant", "zh"), ("ja-JP", "char"), ("th", "char")]
)
def test_a_language_without_spaces_is_tokenized_by_character(language: str, tokenizer: str) -> None:
    assert f"tok:{tokenizer}|" in str(
        score(REFERENCES, REFERENCES, language=language)["bleu_signature"]
    )


@pytest.mark.parametrize(
    ("translations", "references"), [([], []), (["a"], []), (["a"], ["b", "c"])]
)
def test_lists_that_do_not_fit_are_refused(translations: list[str], references: list[str]) -> None:
    with pytest.raises(ValueError, match="translations for"):
        score(translations, references, language="en")
