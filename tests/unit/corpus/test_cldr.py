"""The generated corpus: correct sentences, each value in one split, the same bytes everywhere."""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from random import Random

import pytest
from babel import dates, numbers, units

from lockstep.corpus import cldr
from lockstep.corpus.cldr_format import SPACES, LocaleFormatter, locale
from lockstep.corpus.pairs import Pairs
from lockstep.errors import DataError

MONTHS = {f"{dt.date(2000, m, 1):%B}": m for m in range(1, 13)} | {
    f"{dt.date(2000, m, 1):%b}": m for m in range(1, 13)
}
NAMED_DAY = re.compile(r"(?:[A-Z][a-z]+, )?([A-Z][a-z]+) (\d+), (\d{4})(?:, \d+:\d\d [AP]M)?")
SHORT_DAY = re.compile(r"(\d+)/(\d+)/(\d\d)(?:, \d+:\d\d [AP]M)?")
UNIT_SECONDS = {
    "second": 1,
    "sec": 1,
    "minute": 60,
    "min": 60,
    "hour": 3600,
    "hr": 3600,
    "day": 86_400,
    "week": 604_800,
    "wk": 604_800,
}
UNIT_MONTHS = {"month": 1, "mth": 1, "mo": 1, "year": 12, "yr": 12}
UNITS = "|".join([*UNIT_SECONDS, *UNIT_MONTHS])
SPAN = re.compile(rf"(?:in )?((?:\d[\d,]* (?:{UNITS})s?\.?(?:, and |, | and )?)+)(?: ago)?")
PART = re.compile(r"(\d[\d,]*) ([a-z]+?)s?\.?(?=,| |$)")


@pytest.fixture(scope="module")
def generated() -> tuple[dict[str, Pairs], dict[str, int]]:
    return cldr.generate_pairs("en", "it", limit=110_000, held_out=1000)


@pytest.fixture(scope="module")
def corpus(generated: tuple[dict[str, Pairs], dict[str, int]]) -> dict[str, Pairs]:
    return generated[0]


def formatter(code: str) -> LocaleFormatter:
    return LocaleFormatter(locale(code))


def day_of(text: str) -> dt.date | None:
    """Parse the date in an English sentence of any form."""
    if (match := NAMED_DAY.fullmatch(text)) and match[1] in MONTHS:
        return dt.date(int(match[3]), MONTHS[match[1]], int(match[2]))
    if match := SHORT_DAY.fullmatch(text):
        year = int(match[3])
        return dt.date(year + (1900 if year >= 50 else 2000), int(match[1]), int(match[2]))
    return None


def span_of(text: str) -> tuple[str, int] | None:
    """Parse the duration in an English sentence: (seconds or months, count)."""
    if not (match := SPAN.fullmatch(text)):
        return None
    parts = [(int(count.replace(",", "")), unit) for count, unit in PART.findall(match[1])]
    sizes = UNIT_MONTHS if parts[0][1] in UNIT_MONTHS else UNIT_SECONDS
    return ("months" if sizes is UNIT_MONTHS else "seconds"), sum(
        count * sizes[unit] for count, unit in parts
    )


def list_of(text: str) -> frozenset[str] | None:
    """Parse the names in an English list."""
    return (
        frozenset(re.split(r", (?:and |or )?| and | or ", text))
        if re.search(r" (and|or) [A-Z]", text)
        else None
    )


@pytest.mark.slow
def test_more_than_a_hundred_thousand_pairs_are_distinct_and_no_source_has_two_targets(
    generated: tuple[dict[str, Pairs], dict[str, int]],
) -> None:
    corpus, dropped = generated
    everything = corpus["train"] + corpus["validation"] + corpus["test"]
    assert [len(corpus["train"]), len(corpus["validation"]), len(corpus["test"])] == [
        110_000,
        1000,
        1000,
    ]
    assert len({source for source, _ in everything}) == len(everything)
    assert dropped["conflicting translations"] > 0  # counted, not dropped silently


def test_generation_takes_seconds_on_one_core() -> None:
    start_s = time.process_time()
    cldr.generate_pairs("en", "it", limit=20_000, held_out=100)
    assert time.process_time() - start_s < 30  # about a second


@pytest.mark.parametrize(("value_of", "minimum"), [(day_of, 250), (span_of, 170), (list_of, 80)])
def test_no_value_of_a_held_out_sentence_occurs_in_training(
    corpus: dict[str, Pairs], value_of: Callable[[str], object], minimum: int
) -> None:
    trained = {value for source, _ in corpus["train"] if (value := value_of(source))}
    held_out = [
        value for source, _ in corpus["validation"] + corpus["test"] if (value := value_of(source))
    ]
    assert len(held_out) > 2 * minimum  # the parser above recognizes these sentences
    assert not trained & set(held_out)
    assert not {value_of(source) for source, _ in corpus["validation"]} & {
        value_of(source) for source, _ in corpus["test"]
    } - {None}


def test_no_amount_of_money_of_a_held_out_sentence_occurs_in_training_in_words_or_signs(
    corpus: dict[str, Pairs],
) -> None:
    shared = cldr.shared_codes(formatter("en"), formatter("it"))
    english = formatter("en")
    symbols = {numbers.get_currency_symbol(code, "en"): code for code in shared["currency_names"]}
    words = {
        name: code
        for code in shared["currency_names"]
        for name in english.data["currency_names_plural"][code].values()
    }

    def amount(text: str) -> tuple[Decimal, str] | None:
        match = re.fullmatch(r"(\D+?) ?([\d,]+(?:\.\d+)?)|([\d,]+(?:\.\d+)?) (.+)", text)
        code = (symbols.get(match[1]) if match[1] else words.get(match[4])) if match else None
        return (Decimal((match[2] or match[3]).replace(",", "")), code) if match and code else None

    trained = {value for source, _ in corpus["train"] if (value := amount(source))}
    held_out = [
        value for source, _ in corpus["validation"] + corpus["test"] if (value := amount(source))
    ]
    assert len(trained) > 8000
    assert len(held_out) > 300
    assert not trained & set(held_out)


def test_names_are_in_training_only(corpus: dict[str, Pairs]) -> None:
    train = dict(corpus["train"])
    assert (train["Italian"], train["Switzerland"], train["Wednesday"]) == (
        "italiano",
        "Svizzera",
        "mercoledì",
    )
    names = {source for source, _ in cldr.names(formatter("en"), formatter("it"))}
    assert len(names & train.keys()) > 1500
    assert not names & {source for source, _ in corpus["validation"] + corpus["test"]}


def test_held_out_pairs_do_not_depend_on_the_number_of_training_pairs(
    corpus: dict[str, Pairs],
) -> None:
    small, _ = cldr.generate_pairs("en", "it", limit=3000, held_out=1000)
    assert len(small["train"]) == 3000
    assert set(small["validation"]) == set(corpus["validation"])
    assert set(small["test"]) == set(corpus["test"])


def test_every_family_has_about_its_share_of_the_held_out_pairs(corpus: dict[str, Pairs]) -> None:
    counts = Counter(
        "day" if day_of(s) else "span" if span_of(s) else "list" if list_of(s) else "other"
        for s, _ in corpus["test"]
    )
    assert abs(counts["day"] - 263) < 15
    assert abs(counts["span"] - 192) < 15
    assert abs(counts["list"] - 121) < 25  # some names contain "and"


def test_only_plain_single_spaces_and_none_at_the_ends(corpus: dict[str, Pairs]) -> None:
    for text in (side for pair in corpus["train"] + corpus["test"] for side in pair):
        assert not re.search(r"[^\S ]|  |^ | $", text), repr(text)


def test_spellings_of_a_language_code_are_equal() -> None:
    assert locale("pt-BR") == locale("pt_br") == locale("pt_BR")


def test_pairs_do_not_depend_on_the_process_and_its_hash_seed() -> None:
    program = (
        "import hashlib; from lockstep.corpus.pairs import cldr; m = cldr.generate_pairs('en', 'it', limit=4000, held_out=100);"
        "print(hashlib.sha256(repr(m).encode()).hexdigest())"
    )
    generated = cldr.generate_pairs("en", "it", limit=4000, held_out=100)
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        digest = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        ).stdout.strip()
        assert digest == hashlib.sha256(repr(generated).encode()).hexdigest()


def test_both_languages_format_the_same_value() -> None:
    en, it = formatter("en"), formatter("it")
    day, time_of_day = dt.date(2024, 7, 3), dt.time(15, 5)
    for form, english, italian in [
        (
            lambda v: v.format_duration([(3, "hour"), (5, "minute")], "long", "standard"),
            "3 hours and 5 minutes",
            "3 ore e 5 minuti",
        ),
        (
            lambda v: v.format_duration([(1, "week"), (2, "day")], "long", "unit"),
            "1 week, 2 days",
            "1 settimana e 2 giorni",
        ),
        (lambda v: v.format_relative(16, "second", "", "past"), "16 seconds ago", "16 secondi fa"),
        (lambda v: v.format_relative(1, "day", "", "future"), "in 1 day", "tra 1 giorno"),
        (
            lambda v: v.format_names("territories", ["IT", "FR", "TD"], "standard"),
            "Italy, France, and Chad",
            "Italia, Francia e Ciad",
        ),
        (
            lambda v: v.format_names("territories", ["IT", "FR"], "or"),
            "Italy or France",
            "Italia o Francia",
        ),
        (lambda v: v.format_currency_name(12, "USD"), "12 US dollars", "12 dollari statunitensi"),
        (lambda v: v.format_currency_name(1, "USD"), "1 US dollar", "1 dollaro statunitense"),
        (lambda v: v.format_currency_name(Decimal("12.5"), "EUR"), "12.50 euros", "12,50 euro"),
        (lambda v: v.format_currency(Decimal("1234.5"), "SEK"), "SEK 1,234.50", "1.234,50 SEK"),
        (
            lambda v: v.format_unit(Decimal("2.5"), "length-kilometer", "long"),
            "2.5 kilometers",
            "2,5 chilometri",
        ),
        (lambda v: v.format_percent(Decimal("12.5")), "12.5%", "12,5%"),
        (lambda v: v.format_compact(3_200_000), "3.2 million", "3,2 milioni"),
        (
            lambda v: v.format_date(day, "full"),
            "Wednesday, July 3, 2024",
            "mercoledì 3 luglio 2024",
        ),
        (
            lambda v: v.format_datetime(day, time_of_day, "medium"),
            "Jul 3, 2024, 3:05 PM",
            "3 lug 2024, 15:05",
        ),
    ]:
        texts = [form(v).translate(SPACES) for v in (en, it)]
        assert texts == [english, italian]


@pytest.mark.parametrize("code", ["en", "it", "de", "fr", "ru"])
def test_formats_equal_those_of_babel(code: str) -> None:
    """The reference: babel's slower functions."""
    v, where = formatter(code), locale(code)
    for i in range(1, 400, 7):
        day, moment = dt.date(1950, 1, 1) + dt.timedelta(91 * i), dt.time(i % 24, i % 60)
        assert v.format_number(i * 1000 + 5) == numbers.format_decimal(i * 1000 + 5, locale=where)
        assert v.format_percent(Decimal(i) / 10) == numbers.format_percent(
            Decimal(i) / 1000, locale=where, decimal_quantization=False
        )
        assert v.format_unit(i, "length-meter", "long") == units.format_unit(
            i, "length-meter", "long", locale=where
        )
        assert v.format_currency_name(Decimal(i) / 8, "USD") == numbers.format_currency(
            Decimal(i) / 8, "USD", locale=where, format_type="name"
        )
        assert v.format_currency(i, "EUR") == numbers.format_currency(i, "EUR", locale=where)
        assert v.format_time(moment, "medium") == dates.format_time(moment, "medium", locale=where)
        assert v.format_date(day, "long") == dates.format_date(day, "long", locale=where)
        assert v.format_datetime(day, moment, "short") == (
            dates.get_datetime_format("short", locale=where)
            .replace("'", "")
            .replace("{0}", dates.format_time(moment, "short", locale=where))
            .replace("{1}", dates.format_date(day, "short", locale=where))
        )
        assert (
            v.format_relative(i, "day", "", "past")
            == dates.format_timedelta(
                -dt.timedelta(i),
                granularity="day",
                threshold=10**6,
                add_direction=True,
                locale=where,
            )
            or i >= 1000
        )


def test_no_value_is_rounded_away() -> None:
    """10.5 million is 1.05 crore, not 1.1; an amount in a currency without cents has none."""
    hindi = formatter("hi")
    assert hindi.format_compact(10_500_000).startswith("1.05 ")
    shared = cldr.shared_codes(formatter("en"), formatter("it"))
    for forms in itertools.islice(cldr.money(Random("x"), shared), 3000):
        _, value, currency = forms[0]
        digits = numbers.get_currency_precision(currency)
        assert round(value, digits) == value


@pytest.mark.parametrize(
    ("source", "target"),
    [("de", "fr"), ("ja", "ru"), ("en", "ar"), ("it", "zh-Hant"), ("pt_BR", "hi")],
)
def test_any_two_languages_yield_a_corpus(source: str, target: str) -> None:
    corpus, _ = cldr.generate_pairs(source, target, limit=5000, held_out=100)
    assert [len(corpus["train"]), len(corpus["validation"]), len(corpus["test"])] == [
        5000,
        100,
        100,
    ]
    assert len({s for s, _ in corpus["train"] + corpus["validation"] + corpus["test"]}) == 5200
    assert sum(s == t for s, t in corpus["train"]) < 2000


@pytest.mark.parametrize(
    ("code", "hint"), [("italian", "it"), ("en_UKK", "en_UG"), ("0123456", "codes such as")]
)
def test_an_unknown_language_is_an_error_with_the_nearest_codes(code: str, hint: str) -> None:
    with pytest.raises(DataError) as error:
        cldr.generate_pairs("en", code, limit=100, held_out=10)
    assert repr(code) in error.value.what
    assert re.search(hint, error.value.hint)


def test_languages_without_enough_data_are_refused() -> None:
    with pytest.raises(DataError, match="both 'it'"):
        cldr.generate_pairs("it", "it", limit=100, held_out=10)
    with pytest.raises(DataError, match="no month names in 'jbo'"):
        cldr.generate_pairs("en", "jbo", limit=100, held_out=10)


def test_the_fingerprint_changes_with_every_language() -> None:
    fingerprint = cldr.fingerprint("en", "it")
    assert fingerprint == cldr.fingerprint("en", "it")
    others = {cldr.fingerprint("en", "de"), cldr.fingerprint("fr", "it")}
    assert len({fingerprint, *others}) == 3


def test_shares_add_up() -> None:
    for total in (0, 1, 7, 999, 120_000):
        assert sum(cldr.apportion(total, cldr.FAMILIES).values()) == total
    assert sum(share for share, _ in cldr.FAMILIES.values()) == pytest.approx(1)
