"""A generated parallel corpus, without a download: values of Unicode CLDR in two languages.

CLDR (in the package `babel`) has names (of languages, countries, currencies, units, cities) and
patterns (for dates, times, money, durations, lists) in several hundred languages. A name is a pair
by itself; a *value* (a day, an amount, a set of countries) becomes one when cldr_format.py formats
it in both languages.

    family -> values -> forms of a value (long, short, ...) -> (source, target)

Splits are by value: the value of a held-out sentence does not occur in training in any form. Names
cannot be inferred: all of them are in training.

The result does not depend on the clock, the machine or the order of a set. All randomness is from
`random.Random(text).random()`, whose sequence Python guarantees.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from operator import methodcaller
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import babel
from babel import languages, localedata, numbers
from babel.core import get_global

from lockstep.corpus.cldr_format import (
    SPACES,
    LocaleFormatter,
    MissingCldrData,
    Parts,
    locale,
)
from lockstep.errors import DataError

GENERATOR = 1  # part of the fingerprint: increment it when the generated sentences change
MAX_PAIRS = (
    400_000  # number of pairs with `limit=0`; the ranges of the families below are sized for it
)

TRAINING_ONLY = {"minutes"}  # 3:05 PM occurs in dates too, so it would not be an unseen value
NAMES_SHARE = 0.1  # of the training pairs at most, to keep a small corpus balanced
FORMS_OF_A_VALUE = 3  # per training value: more values teach more than more forms

DAY_STYLES = (
    ("full", "short"),
    ("long", "full"),
    ("medium", "long"),
    ("short", "medium"),
    ("yMMMEd", "full"),
)  # alone, with a time
FIRST_DAY, DAYS = dt.date(1950, 1, 1), 36_525  # 100 years, so that a two-digit year is unambiguous

# Units of exact durations (in seconds) and calendar durations (in months), and their combinations.
SIZES = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 604_800,
    "month": 1,
    "year": 12,
}
BASE = {unit: "month" if unit in ("month", "year") else "second" for unit in SIZES}
UNIT_COMBINATIONS: dict[tuple[str, ...], int] = {  # units -> maximum count of the first one
    ("second",): 999,
    ("minute",): 999,
    ("hour",): 499,
    ("day",): 999,
    ("week",): 199,
    ("month",): 199,
    ("year",): 499,
    ("minute", "second"): 59,
    ("hour", "minute"): 48,
    ("hour", "minute", "second"): 23,
    ("day", "hour"): 60,
    ("day", "hour", "minute"): 30,
    ("week", "day"): 51,
    ("year", "month"): 99,
}

T = TypeVar("T")
Pair = tuple[str, str]
Form = Callable[[LocaleFormatter], str]
Values = Iterator[list[Form]]
SharedCodes = dict[str, list[str]]  # table of CLDR -> codes with a name in both languages


# Families. Each function yields the forms of each value once. `rng` is the only randomness.


def below(rng: Random, n: int) -> int:
    return int(rng.random() * n)


def shuffled(rng: Random, items: Iterable[T]) -> list[T]:
    return [item for _, _, item in sorted((rng.random(), i, item) for i, item in enumerate(items))]


def distinct(sample: Callable[[], T], max_misses: int = 1000) -> Iterator[T]:
    """Yield the values of `sample`, each once; stop after `max_misses` consecutive repetitions."""
    seen: set[T] = set()
    misses = 0
    while misses < max_misses:
        value = sample()
        misses = misses + 1 if value in seen else 0
        if not misses:
            seen.add(value)
            yield value


def shared_codes(a: LocaleFormatter, b: LocaleFormatter) -> SharedCodes:
    """Return the codes that CLDR names in both languages, in a fixed order."""
    spoken: Any = get_global("territory_languages")  # countries only, with their languages
    tender = {
        c
        for of in get_global("territory_currencies").values()
        for c, _, end, legal in of
        if legal and not end
    }
    official = {c for country in spoken for c in languages.get_official_languages(country)}
    units = [unit for unit in a.data["unit_patterns"] if not unit.startswith("duration-")]
    codes = {
        "unit_patterns": units,
        "currency_names": tender,
        "territories": spoken,
        "languages": official,
    }
    return {
        table: sorted(c for c in of if a.data[table].get(c) and b.data[table].get(c))
        for table, of in codes.items()
    }


def dates(rng: Random, shared: SharedCodes) -> Values:
    """Days, alone and with a time, which is not part of the value."""
    for number in shuffled(rng, range(DAYS)):
        day, time = FIRST_DAY + dt.timedelta(number), dt.time(below(rng, 24), below(rng, 60))
        yield [
            form
            for alone, timed in DAY_STYLES
            for form in (
                methodcaller("format_date", day, alone),
                methodcaller("format_datetime", day, time, timed),
            )
        ]


def times(rng: Random, shared: SharedCodes) -> Values:
    """Times with seconds, which no other family contains."""
    for second in distinct(lambda: below(rng, 86_400)):
        if second % 60:
            yield [
                methodcaller(
                    "format_time", dt.time(second // 3600, second // 60 % 60, second % 60), "medium"
                )
            ]


def minutes(rng: Random, shared: SharedCodes) -> Values:
    for minute in shuffled(rng, range(1440)):
        yield [
            methodcaller("format_time", dt.time(minute // 60, minute % 60), style)
            for style in ("short", "medium")
        ]


def split_duration(duration: int, units: Sequence[str], limit: int) -> Parts | None:
    """Split a duration into exactly these units, largest first, each at least 1 and the first at
    most `limit`. None if that is impossible."""
    parts = []
    for unit in units:
        count, duration = divmod(duration, SIZES[unit])
        parts.append((count, unit))
    fits = duration == 0 and all(count for count, _ in parts) and parts[0][0] <= limit
    return parts if fits else None


def durations(rng: Random, shared: SharedCodes) -> Values:
    """Durations in all combinations of units: 90 minutes equals 1 hour and 30 minutes."""

    def duration() -> tuple[str, int]:
        units, limit = list(UNIT_COMBINATIONS.items())[below(rng, len(UNIT_COMBINATIONS))]
        sizes = [SIZES[unit] for unit in units]
        limits = [limit, *(larger // size - 1 for larger, size in itertools.pairwise(sizes))]
        return BASE[units[0]], sum(
            size * (1 + below(rng, limit)) for size, limit in zip(sizes, limits, strict=True)
        )

    for base, length in distinct(duration):
        forms: list[Form] = []
        for units, limit in UNIT_COMBINATIONS.items():
            parts = split_duration(length, units, limit) if BASE[units[0]] == base else None
            if not parts:
                continue
            if len(parts) == 1:
                directions = itertools.product(("future", "past"), ("", "-short"))
                forms += [
                    methodcaller("format_relative", *parts[0], length, direction)
                    for direction, length in directions
                ]
            styles = itertools.product(
                ("standard", "unit") if len(parts) > 1 else ("standard",), ("long", "short")
            )
            forms += [
                methodcaller("format_duration", parts, length, style) for style, length in styles
            ]
        yield forms


def money(rng: Random, shared: SharedCodes) -> Values:
    """Whole amounts, and amounts with cents in currencies that have cents."""
    currencies = shared["currency_names"]

    def amount() -> tuple[int | Decimal, str]:
        kind, currency = rng.random(), currencies[below(rng, len(currencies))]
        if kind < 0.45 and numbers.get_currency_precision(currency) >= 2:
            return Decimal(101 + below(rng, 99_899)) / 100, currency
        return 1 + below(rng, 999 if kind < 0.8 else 99_999), currency

    for value, currency in distinct(amount) if currencies else ():
        exact = int(value) if value == int(value) else value
        yield [
            methodcaller(form, exact, currency)
            for form in ("format_currency_name", "format_currency")
        ]


def units(rng: Random, shared: SharedCodes) -> Values:
    codes = shared["unit_patterns"]

    def quantity() -> tuple[int | Decimal, str]:
        kind, unit = rng.random(), codes[below(rng, len(codes))]
        if kind < 0.2:
            return Decimal(1 + below(rng, 999)) / 10, unit
        return 1 + below(rng, 99 if kind < 0.6 else 999 if kind < 0.9 else 9999), unit

    for value, unit in distinct(quantity) if codes else ():
        yield [methodcaller("format_unit", value, unit, length) for length in ("long", "short")]


def plain_numbers(rng: Random, shared: SharedCodes) -> Values:
    """Round millions and billions, integers below 10**7, up to three decimals."""

    def number() -> int | Decimal:
        kind = rng.random()
        if kind < 0.4:
            return (10 + below(rng, 990)) * (10**5, 10**8)[below(rng, 2)]
        if kind < 0.7:
            return 1 + below(rng, (10**2, 10**3, 10**4, 10**5, 10**6, 10**7)[below(rng, 6)])
        return Decimal(1 + below(rng, 10**6)).scaleb(-1 - below(rng, 3))

    for value in distinct(number):
        is_round = isinstance(value, int) and value >= 10**6 and value % 10**5 == 0
        yield [
            methodcaller(form, value)
            for form in ("format_number", "format_compact")[: 1 + is_round]
        ]


def percentages(rng: Random, shared: SharedCodes) -> Values:
    for tenth in shuffled(rng, range(3000)):
        yield [methodcaller("format_percent", Decimal(tenth) / 10)]


def sets_of_names(table: str, rng: Random, shared: SharedCodes) -> Values:
    """Lists of two to four names. The value is the set: all its orders are in one split."""
    codes = shared[table]
    for chosen in (
        distinct(lambda: frozenset(codes[below(rng, len(codes))] for _ in range(2 + below(rng, 3))))
        if codes
        else ()
    ):
        order = shuffled(rng, sorted(chosen))
        if len(order) > 1:
            yield [
                methodcaller("format_names", table, order, style) for style in ("standard", "or")
            ]


# Family -> (share of the sentences, generator). Dates, durations and money are the purpose of the
# corpus; units and lists contribute most of the vocabulary; the others have few words and forms.
FAMILIES: dict[str, tuple[float, Callable[[Random, SharedCodes], Values]]] = {
    "dates": (0.26, dates),
    "times": (0.05, times),
    "minutes": (0.01, minutes),
    "durations": (0.19, durations),
    "money": (0.17, money),
    "units": (0.14, units),
    "numbers": (0.05, plain_numbers),
    "percentages": (0.01, percentages),
    "countries": (0.09, partial(sets_of_names, "territories")),
    "tongues": (0.03, partial(sets_of_names, "languages")),
}


def names(a: LocaleFormatter, b: LocaleFormatter) -> Iterator[Pair]:
    """Yield every name in both languages: countries, currencies, units, cities, months, ..."""

    def shared(x: Mapping[Any, Any], y: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        return [(x[key], y[key]) for key in sorted(x.keys() & y.keys())]

    for table in ("languages", "territories", "scripts", "variants", "currency_names"):
        yield from shared(a.data[table], b.data[table])
    for x, y in shared(a.data["unit_display_names"], b.data["unit_display_names"]):
        yield x.get("long") or x.get("short", ""), y.get("long") or y.get("short", "")
    for table in ("months", "days", "quarters"):
        yield from shared(
            a.data[table]["stand-alone"]["wide"], b.data[table]["stand-alone"]["wide"]
        )
    for x, y in shared(a.data["meta_zones"], b.data["meta_zones"]):
        x, y = x.get("long", {}), y.get("long", {})
        yield from (
            (x[key], y[key]) for key in ("generic", "standard", "daylight") if key in x and key in y
        )
    zones_a, zones_b = a.data["time_zones"], b.data["time_zones"]
    for zone in sorted(set(zones_a) | set(zones_b)):
        # CLDR: the default name of a city is the last part of the zone's identifier.
        default = zone.rpartition("/")[2].replace("_", " ")
        x, y = zones_a.get(zone, {}).get("city"), zones_b.get(zone, {}).get("city")
        if (x or y) and not zone.startswith("Etc/"):
            yield x or default, y or default


class Collector:
    """Collects pairs. Drops duplicates and conflicting translations, and counts them by reason."""

    def __init__(self, source: LocaleFormatter, target: LocaleFormatter) -> None:
        self.source, self.target = source, target
        self.targets: dict[str, str] = {}
        self.left_out: Counter[str] = Counter()

    def add(self, source: str, target: str) -> Pair | None:
        """Return the pair with plain spaces, or None if it is dropped."""
        source, target = (
            " ".join(source.translate(SPACES).split()),
            " ".join(target.translate(SPACES).split()),
        )
        known_target = self.targets.get(source)
        if not source or not target:
            self.left_out["values that CLDR lacks in one language"] += 1
        elif known_target is None:
            self.targets[source] = target
            return source, target
        else:
            self.left_out[
                "duplicates" if known_target == target else "conflicting translations"
            ] += 1
        return None

    def add_value(self, form: Form) -> Pair | None:
        try:
            return self.add(form(self.source), form(self.target))
        except MissingCldrData:
            return self.add("", "")


def generate_sentences(
    values: Values, collector: Collector, rng: Random, held_out: int, train: int
) -> tuple[list[Pair], ...]:
    """Return training, validation and test pairs of one family. The first values go to validation
    (each in one form), the next to test, the others to training, so the held-out pairs do not
    depend on the number of training pairs."""
    splits: tuple[list[Pair], ...] = ([], [], [])
    for count, split, max_forms in (
        (held_out, splits[1], 1),
        (held_out, splits[2], 1),
        (train, splits[0], FORMS_OF_A_VALUE),
    ):
        while len(split) < count and (forms := next(values, None)) is not None:
            first = below(rng, len(forms))
            for form in [*forms[first:], *forms[:first]][: min(max_forms, count - len(split))]:
                pair = collector.add_value(form)
                if pair:
                    split.append(pair)
    return splits


def generate_pairs(
    source: str, target: str, *, limit: int, held_out: int
) -> tuple[dict[str, list[Pair]], dict[str, int]]:
    """Generate pairs for two of CLDR's languages, by their codes (en, pt_BR, zh_Hant). Return the
    pairs of each split, and the number of dropped pairs by reason.

    limit      maximum number of training pairs; 0: all (MAX_PAIRS); 120,000 take about 4 s
    held_out   pairs in validation and in test; independent of `limit`
    DataError if CLDR lacks a language, or most of its data.
    """
    if locale(source) == locale(target):
        raise DataError(
            f"source and target are both {source!r}",
            "data.source, data.target",
            "name two languages",
        )
    collector = Collector(LocaleFormatter(locale(source)), LocaleFormatter(locale(target)))
    limit = limit or MAX_PAIRS
    dictionary = [
        pair for x, y in names(collector.source, collector.target) if (pair := collector.add(x, y))
    ]
    train = shuffled(Random("names"), dictionary)[: int(NAMES_SHARE * limit)]
    splits = {"train": train, "validation": list[Pair](), "test": list[Pair]()}
    collector.left_out["names beyond their share"] = len(dictionary) - len(train)
    shared = shared_codes(collector.source, collector.target)
    draws = {family: Random(f"{family} {GENERATOR}") for family in FAMILIES}
    streams: dict[str, Values] = {}
    for family, (_, values) in FAMILIES.items():
        stream = values(draws[family], shared)
        if first := next(
            stream, None
        ):  # a family without shared data gives its share to the others
            streams[family] = itertools.chain([first], stream)
    shares = apportion(limit - len(train), streams)
    held_shares = apportion(held_out, streams.keys() - TRAINING_ONLY)
    for family, stream in streams.items():
        family_splits = generate_sentences(
            stream, collector, draws[family], held_shares.get(family, 0), shares[family]
        )
        for split, pairs in zip(splits.values(), family_splits, strict=True):
            split += pairs
    if len(train) < min(limit, 1000) or (
        held_out and not (splits["validation"] and splits["test"])
    ):
        counts = f"{len(train)} training and {len(splits['validation'])} held-out pairs"
        what = f"CLDR has too little data for {source!r} and {target!r}: {counts}"
        hint = "use languages that CLDR covers well, or increase data.pairs"
        raise DataError(what, f"babel {babel.__version__}, data.source, data.target", hint)
    mixed = {
        name: shuffled(Random(name), split)
        for name, split in splits.items()
        if held_out or name == "train"
    }
    return mixed, {reason: n for reason, n in sorted(collector.left_out.items()) if n}


def apportion(total: int, families: Collection[str]) -> dict[str, int]:
    """Distribute `total` sentences over `families` by share, rounding by largest remainders."""
    weights = {family: share for family, (share, _) in FAMILIES.items() if family in families}
    exact = {family: total * weight / sum(weights.values()) for family, weight in weights.items()}
    counts = {family: int(n) for family, n in exact.items()}
    for family in sorted(exact, key=lambda f: counts[f] - exact[f])[: total - sum(counts.values())]:
        counts[family] += 1
    return counts


def fingerprint(source: str, target: str) -> str:
    """Return the hex sha256 of the CLDR data of both languages, and of the versions."""
    digest = hashlib.sha256(f"cldr {GENERATOR} {babel.__version__}".encode())
    folder = Path(localedata.__file__).parent / "locale-data"
    for code in (source, target):
        parts = str(locale(code)).split("_")
        for count in range(1, len(parts) + 1):
            digest.update((folder / f"{'_'.join(parts[:count])}.dat").read_bytes())
    return digest.hexdigest()
