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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import partial
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
# Number of pairs with `limit=0`; the ranges of the families below are sized for it.
MAX_PAIRS = 400_000

TRAINING_ONLY = {"minutes"}  # 3:05 PM occurs in dates too, so it would not be an unseen value
NAMES_SHARE = 0.1  # of the training pairs at most, to keep a small corpus balanced
FORMS_OF_A_VALUE = 3  # per training value: more values teach more than more forms

MAX_MISSES = 1000

DAY_STYLES = (  # alone, with a time
    ("full", "short"),
    ("long", "full"),
    ("medium", "long"),
    ("short", "medium"),
    ("yMMMEd", "full"),
)
FIRST_DAY = dt.date(1950, 1, 1)
DAYS = 36_525  # 100 years, so that a two-digit year is unambiguous

# Units of exact durations in seconds. A month is longer than all their combinations, so that
# no duration has both.
MONTH = 10**9
SIZES = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 604_800,
    "month": MONTH,
    "year": 12 * MONTH,
}
UNIT_COMBINATIONS = {  # units, largest first -> maximum count of the first one
    "second": 999,
    "minute": 999,
    "hour": 499,
    "day": 999,
    "week": 199,
    "month": 199,
    "year": 499,
    "minute second": 59,
    "hour minute": 48,
    "hour minute second": 23,
    "day hour": 60,
    "day hour minute": 30,
    "week day": 51,
    "year month": 99,
}

T = TypeVar("T")
Pair = tuple[str, str]
Form = tuple[Any, ...]  # a method of LocaleFormatter and its arguments
Values = Iterator[list[Form]]
SharedCodes = dict[str, list[str]]  # table of CLDR -> codes with a name in both languages


# Families. Each function yields the forms of each value once. `rng` is the only randomness.


def below(rng: Random, n: int) -> int:
    return int(rng.random() * n)


def shuffled(rng: Random, items: Iterable[T]) -> list[T]:
    return [item for _, _, item in sorted((rng.random(), i, item) for i, item in enumerate(items))]


def distinct(sample: Callable[[], T]) -> Iterator[T]:
    """Yield the values of `sample`, each once; stop after MAX_MISSES consecutive repetitions."""
    seen: set[T] = set()
    misses = 0
    while misses < MAX_MISSES:
        value = sample()
        misses = misses + 1 if value in seen else 0
        if not misses:
            seen.add(value)
            yield value


def shared_codes(a: LocaleFormatter, b: LocaleFormatter) -> SharedCodes:
    """Return the codes that CLDR names in both languages, in a fixed order."""
    spoken: Any = get_global("territory_languages")  # countries only, with their languages
    currencies = itertools.chain.from_iterable(get_global("territory_currencies").values())
    codes = {
        "unit_patterns": {u for u in a.data["unit_patterns"] if not u.startswith("duration-")},
        "currency_names": {code for code, _, end, is_tender in currencies if is_tender and not end},
        "territories": spoken,
        "languages": {c for country in spoken for c in languages.get_official_languages(country)},
    }
    return {
        table: sorted(c for c in of if a.data[table].get(c) and b.data[table].get(c))
        for table, of in codes.items()
    }


def dates(rng: Random, shared: SharedCodes) -> Values:
    """Days, alone and with a time, which is not part of the value."""
    for number in shuffled(rng, range(DAYS)):
        day = FIRST_DAY + dt.timedelta(number)
        time = dt.time(below(rng, 24), below(rng, 60))
        forms: list[Form] = []
        for alone, timed in DAY_STYLES:
            forms += [("format_date", day, alone), ("format_datetime", day, time, timed)]
        yield forms


def times(rng: Random, shared: SharedCodes) -> Values:
    """Times with seconds, which no other family contains."""
    for second in distinct(lambda: below(rng, 86_400)):
        if second % 60:
            time = dt.time(second // 3600, second // 60 % 60, second % 60)
            yield [("format_time", time, "medium")]


def minutes(rng: Random, shared: SharedCodes) -> Values:
    for minute in shuffled(rng, range(1440)):
        time = dt.time(minute // 60, minute % 60)
        yield [("format_time", time, style) for style in ("short", "medium")]


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
    combinations = [(units.split(), limit) for units, limit in UNIT_COMBINATIONS.items()]

    def duration() -> int:
        units, limit = combinations[below(rng, len(combinations))]
        sizes = [SIZES[unit] for unit in units]
        limits = [limit, *(larger // size - 1 for larger, size in itertools.pairwise(sizes))]
        return sum(
            size * (1 + below(rng, limit)) for size, limit in zip(sizes, limits, strict=True)
        )

    for length in distinct(duration):
        forms: list[Form] = []
        for units, limit in combinations:
            parts = split_duration(length, units, limit)
            if not parts:
                continue
            styles = ["standard", "unit"]
            if len(parts) == 1:
                styles = ["standard"]
                for way, size in itertools.product(("future", "past"), ("", "-short")):
                    forms.append(("format_relative", *parts[0], size, way))
            for style, size in itertools.product(styles, ("long", "short")):
                forms.append(("format_duration", parts, size, style))
        yield forms


def money(rng: Random, shared: SharedCodes) -> Values:
    """Whole amounts, and amounts with cents in currencies that have cents."""
    currencies = shared["currency_names"]

    def amount() -> tuple[int | Decimal, str]:
        kind = rng.random()
        currency = currencies[below(rng, len(currencies))]
        if kind < 0.45 and numbers.get_currency_precision(currency) >= 2:
            return Decimal(101 + below(rng, 99_899)) / 100, currency
        return 1 + below(rng, 999 if kind < 0.8 else 99_999), currency

    for value, currency in distinct(amount) if currencies else ():
        exact = int(value) if value == int(value) else value
        yield [(form, exact, currency) for form in ("format_currency_name", "format_currency")]


def units(rng: Random, shared: SharedCodes) -> Values:
    codes = shared["unit_patterns"]

    def quantity() -> tuple[int | Decimal, str]:
        kind = rng.random()
        unit = codes[below(rng, len(codes))]
        if kind < 0.2:
            return Decimal(1 + below(rng, 999)) / 10, unit
        largest = (99, 999, 9999)[(kind >= 0.6) + (kind >= 0.9)]
        return 1 + below(rng, largest), unit

    for value, unit in distinct(quantity) if codes else ():
        yield [("format_unit", value, unit, length) for length in ("long", "short")]


def plain_numbers(rng: Random, shared: SharedCodes) -> Values:
    """Round millions and billions, integers below 10**7, up to three decimals."""

    def number() -> int | Decimal:
        kind = rng.random()
        if kind < 0.4:
            return (10 + below(rng, 990)) * (10**5, 10**8)[below(rng, 2)]
        if kind < 0.7:
            return 1 + below(rng, 10 ** (2 + below(rng, 6)))
        return Decimal(1 + below(rng, 10**6)).scaleb(-1 - below(rng, 3))

    for value in distinct(number):
        forms: list[Form] = [("format_number", value)]
        if isinstance(value, int) and value >= 10**6 and value % 10**5 == 0:
            forms.append(("format_compact", value))
        yield forms


def percentages(rng: Random, shared: SharedCodes) -> Values:
    for tenth in shuffled(rng, range(3000)):
        yield [("format_percent", Decimal(tenth) / 10)]


def sets_of_names(table: str, rng: Random, shared: SharedCodes) -> Values:
    """Lists of two to four names. The value is the set: all its orders are in one split."""
    codes = shared[table]

    def names() -> frozenset[str]:
        return frozenset(codes[below(rng, len(codes))] for _ in range(2 + below(rng, 3)))

    for chosen in distinct(names) if codes else ():
        order = shuffled(rng, sorted(chosen))
        if len(order) > 1:
            yield [("format_names", table, order, style) for style in ("standard", "or")]


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

    def shared(*path: str) -> list[tuple[Any, Any]]:
        x, y = a.data, b.data
        for key in path:
            x, y = x[key], y[key]
        return [(x[key], y[key]) for key in sorted(x.keys() & y.keys())]

    for table in ("languages", "territories", "scripts", "variants", "currency_names"):
        yield from shared(table)
    for x, y in shared("unit_display_names"):
        yield x.get("long") or x.get("short", ""), y.get("long") or y.get("short", "")
    for table in ("months", "days", "quarters"):
        yield from shared(table, "stand-alone", "wide")
    for x, y in shared("meta_zones"):
        x, y = x.get("long", {}), y.get("long", {})
        for key in ("generic", "standard", "daylight"):
            if key in x and key in y:
                yield x[key], y[key]
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
        self.languages = source, target
        self.targets: dict[str, str] = {}
        self.left_out: Counter[str] = Counter()

    def add(self, *sides: str) -> Pair | None:
        """Return the pair with plain spaces, or None if it is dropped."""
        source, target = (" ".join(side.translate(SPACES).split()) for side in sides)
        known_target = self.targets.get(source)
        if not source or not target:
            self.left_out["values that CLDR lacks in one language"] += 1
        elif known_target is None:
            self.targets[source] = target
            return source, target
        elif known_target == target:
            self.left_out["duplicates"] += 1
        else:
            self.left_out["conflicting translations"] += 1
        return None

    def add_value(self, form: Form) -> Pair | None:
        name, *arguments = form
        try:
            return self.add(*(getattr(language, name)(*arguments) for language in self.languages))
        except MissingCldrData:
            return self.add("", "")


def generate_sentences(
    values: Values, collector: Collector, rng: Random, held_out: int, train_count: int
) -> tuple[list[Pair], ...]:
    """Return training, validation and test pairs of one family. The first values go to validation
    (each in one form), the next to test, the others to training, so the held-out pairs do not
    depend on the number of training pairs."""

    def generate(count: int, max_forms: int) -> list[Pair]:
        split: list[Pair] = []
        while len(split) < count and (forms := next(values, None)) is not None:
            first = below(rng, len(forms))
            rotated = forms[first:] + forms[:first]
            pairs = map(collector.add_value, rotated[: min(max_forms, count - len(split))])
            split += filter(None, pairs)
        return split

    validation = generate(held_out, 1)
    test = generate(held_out, 1)
    return generate(train_count, FORMS_OF_A_VALUE), validation, test


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
    languages = LocaleFormatter(locale(source)), LocaleFormatter(locale(target))
    collector = Collector(*languages)
    limit = limit or MAX_PAIRS
    dictionary = [pair for sides in names(*languages) if (pair := collector.add(*sides))]
    train = shuffled(Random("names"), dictionary)[: int(NAMES_SHARE * limit)]
    splits: dict[str, list[Pair]] = {"train": train, "validation": [], "test": []}
    collector.left_out["names beyond their share"] = len(dictionary) - len(train)
    shared = shared_codes(*languages)
    draws = {family: Random(f"{family} {GENERATOR}") for family in FAMILIES}
    streams: dict[str, Values] = {}
    for family, (_, values) in FAMILIES.items():
        stream = values(draws[family], shared)
        if first := next(stream, None):  # else the other families get its share
            streams[family] = itertools.chain([first], stream)
    shares = apportion(limit - len(train), streams)
    held_shares = apportion(held_out, streams.keys() - TRAINING_ONLY)
    for family, stream in streams.items():
        generated = generate_sentences(
            stream, collector, draws[family], held_shares.get(family, 0), shares[family]
        )
        for split, pairs in zip(splits.values(), generated, strict=True):
            split += pairs
    held_out_counts = [len(splits[name]) for name in ("validation", "test")]
    if len(train) < min(limit, 1000) or (held_out and not all(held_out_counts)):
        counts = f"{len(train)} training and {held_out_counts[0]} held-out pairs"
        raise DataError(
            f"CLDR has too little data for {source!r} and {target!r}: {counts}",
            f"babel {babel.__version__}, data.source, data.target",
            "use languages that CLDR covers well, or increase data.pairs",
        )
    mixed = {
        name: shuffled(Random(name), split)
        for name, split in splits.items()
        if held_out or name == "train"
    }
    return mixed, dict(sorted((+collector.left_out).items()))


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
