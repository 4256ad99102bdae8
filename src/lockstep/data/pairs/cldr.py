"""A parallel corpus that needs no download: Unicode CLDR, as the package `babel` carries it, said in two languages.

CLDR's people have vetted the names of languages, countries, currencies, units and cities, and the patterns for dates, times, amounts of
money, durations and lists, in several hundred languages. A name is a pair by itself. A *value* (a day, an amount of money, a set of
countries) becomes a pair when both languages say it, so there are as many sentences as one likes, and each of them is right.

    family -> values -> forms of a value (said long, said short, ...) -> (source, target)

The held-out split is by value: a value's sentences lie all in one of training, validation and test, so that a held-out sentence's value
was never seen in any form. Names are a dictionary, which nobody can guess: they are all in training, and never asked for by themselves.

Nothing here depends on the clock, the machine or the order of a set. Randomness is `random.Random(text).random()` only, the one method
whose numbers Python promises to keep. CLDR writes no-break and thin spaces where one types a space; all become plain spaces.
How one language says a value is in voice.py.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import babel
from babel import languages, localedata, numbers
from babel.core import get_global

from lockstep.data.pairs.cldr_format import SPACES, Parts, Unsaid, Voice, locale
from lockstep.errors import DataError

GENERATOR = 1  # belongs to the fingerprint: raise it whenever another sentence can come out
MOST_PAIRS = 400_000  # what `limit=0` makes; the families' ranges below are sized for it

# The share of each family in the sentences. Dates, durations and money are what the corpus is for; units and lists carry most of the
# words; times, numbers and percentages have few words and few forms, and would fill the corpus with digits if they were given more.
MIXTURE = {
    "dates": 0.26,
    "times": 0.05,
    "minutes": 0.01,
    "durations": 0.19,
    "money": 0.17,
    "units": 0.14,
    "numbers": 0.05,
    "percentages": 0.01,
    "countries": 0.09,
    "tongues": 0.03,
}
TRAINING_ONLY = {"minutes"}  # 3:05 PM is said inside dates, so it would be no unseen value
NAMES_AT_MOST = 0.1  # of the training pairs: a small corpus keeps its balance too
FORMS_OF_A_VALUE = 3  # sentences that a training value is said in: more values teach more than more forms of one

DAY_STYLES = (("full", "short"), ("long", "full"), ("medium", "long"), ("short", "medium"), ("yMMMEd", "full"))  # alone, with a time
FIRST_DAY, DAYS = dt.date(1950, 1, 1), 36_525  # one hundred years, so that a year of two digits still means one day

# Lengths of time: the units that make up a second-exact span and a calendar span, and the ways a span is said in them.
SIZES = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800, "month": 1, "year": 12}
BASE = {unit: "month" if unit in ("month", "year") else "second" for unit in SIZES}
WAYS: dict[tuple[str, ...], int] = {  # units -> the most of the first one
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
Form = Callable[[Voice], str]
Values = Iterator[list[Form]]


@dataclass(frozen=True)
class Made:
    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> pairs


# Values. Each function yields, value after value and each value once, the forms it can be said in. `draw` is the only source of chance.


def below(draw: Random, n: int) -> int:
    return int(draw.random() * n)


def shuffled(draw: Random, items: Iterable[T]) -> list[T]:
    return [item for _, _, item in sorted((draw.random(), i, item) for i, item in enumerate(items))]


def distinct(draw_one: Callable[[], T], in_vain: int = 1000) -> Iterator[T]:
    """Values of `draw_one`, each once; ends after `in_vain` draws in a row that were all there before."""
    seen: set[T] = set()
    misses = 0
    while misses < in_vain:
        value = draw_one()
        misses = misses + 1 if value in seen else 0
        if not misses:
            seen.add(value)
            yield value


@dataclass(frozen=True)
class Shared:
    """Codes that both languages have words for, in a fixed order."""

    units: list[str]
    currencies: list[str]
    countries: list[str]
    tongues: list[str]

    @classmethod
    def of(cls, a: Voice, b: Voice) -> Shared:
        def both(table: str, codes: Iterable[str]) -> list[str]:
            return sorted(code for code in codes if a.data[table].get(code) and b.data[table].get(code))

        spoken: Any = get_global("territory_languages")  # real countries only, with what is spoken there
        tender = {c for of in get_global("territory_currencies").values() for c, _, end, legal in of if legal and not end}
        official = {c for country in spoken for c in languages.get_official_languages(country)}
        return cls(
            units=[u for u in both("unit_patterns", a.data["unit_patterns"]) if not u.startswith("duration-")],
            currencies=both("currency_names", tender),
            countries=both("territories", spoken),
            tongues=both("languages", official),
        )


def dates(draw: Random, shared: Shared) -> Values:
    """Days, alone and with a time of day; the time is no part of the value, so a held-out day is never seen at any hour."""
    for number in shuffled(draw, range(DAYS)):
        day, time = FIRST_DAY + dt.timedelta(number), dt.time(below(draw, 24), below(draw, 60))
        yield [
            form
            for alone, timed in DAY_STYLES
            for form in (partial(Voice.day, value=day, style=alone), partial(Voice.moment, day=day, time=time, style=timed))
        ]


def times(draw: Random, shared: Shared) -> Values:
    """Times with seconds, which occur nowhere else."""
    for second in distinct(lambda: below(draw, 86_400)):
        if second % 60:
            yield [partial(Voice.clock, value=dt.time(second // 3600, second // 60 % 60, second % 60), style="medium")]


def minutes(draw: Random, shared: Shared) -> Values:
    for minute in shuffled(draw, range(1440)):
        yield [partial(Voice.clock, value=dt.time(minute // 60, minute % 60), style=style) for style in ("short", "medium")]


def split_span(span: int, units: Sequence[str], most: int) -> Parts | None:
    """`span` in exactly these units, largest first, none of them 0 and at most `most` of the first; None when that cannot be."""
    parts = []
    for unit in units:
        count, span = divmod(span, SIZES[unit])
        parts.append((count, unit))
    fits = span == 0 and all(count for count, _ in parts) and parts[0][0] <= most
    return parts if fits else None


def durations(draw: Random, shared: Shared) -> Values:
    """Lengths of time. 90 minutes is 1 hour and 30 minutes: one value, said in all the ways it splits into units."""

    def span() -> tuple[str, int]:
        units, most = list(WAYS.items())[below(draw, len(WAYS))]
        sizes = [SIZES[unit] for unit in units]
        tops = [most, *(larger // size - 1 for larger, size in itertools.pairwise(sizes))]
        return BASE[units[0]], sum(size * (1 + below(draw, top)) for size, top in zip(sizes, tops, strict=True))

    for base, length in distinct(span):
        forms: list[Form] = []
        for units, most in WAYS.items():
            parts = split_span(length, units, most) if BASE[units[0]] == base else None
            if not parts:
                continue
            if len(parts) == 1:
                (count, unit), tails = parts[0], ("", "-short")
                forms += [
                    partial(Voice.relative, value=count, unit=unit, length=tail, direction=direction)
                    for direction, tail in itertools.product(("future", "past"), tails)
                ]
            styles = ("standard", "unit") if len(parts) > 1 else ("standard",)
            forms += [
                partial(Voice.span, parts=parts, length=size, style=style) for style, size in itertools.product(styles, ("long", "short"))
            ]
        yield forms


def money(draw: Random, shared: Shared) -> Values:
    """Whole amounts, and amounts with cents in currencies that have them (a yen's cents would be rounded away, and the value with them)."""

    def amount() -> tuple[int | Decimal, str]:
        kind, currency = draw.random(), shared.currencies[below(draw, len(shared.currencies))]
        if kind < 0.45 and numbers.get_currency_precision(currency) >= 2:
            return Decimal(101 + below(draw, 99_899)) / 100, currency
        return 1 + below(draw, 999 if kind < 0.8 else 99_999), currency

    for value, currency in distinct(amount) if shared.currencies else ():
        exact = int(value) if value == int(value) else value
        yield [partial(form, value=exact, currency=currency) for form in (Voice.money, Voice.price)]


def units(draw: Random, shared: Shared) -> Values:
    def quantity() -> tuple[int | Decimal, str]:
        kind, unit = draw.random(), shared.units[below(draw, len(shared.units))]
        if kind < 0.2:
            return Decimal(1 + below(draw, 999)) / 10, unit
        return 1 + below(draw, 99 if kind < 0.6 else 999 if kind < 0.9 else 9999), unit

    for value, unit in distinct(quantity) if shared.units else ():
        yield [partial(Voice.unit, value=value, unit=unit, length=length) for length in ("long", "short")]


def plain_numbers(draw: Random, shared: Shared) -> Values:
    """Round millions and billions, whole numbers of up to seven digits, decimal fractions of up to three places."""

    def number() -> int | Decimal:
        kind = draw.random()
        if kind < 0.4:
            return (10 + below(draw, 990)) * (10**5, 10**8)[below(draw, 2)]
        if kind < 0.7:
            return 1 + below(draw, (10**2, 10**3, 10**4, 10**5, 10**6, 10**7)[below(draw, 6)])
        return Decimal(1 + below(draw, 10**6)).scaleb(-1 - below(draw, 3))

    for value in distinct(number):
        forms: list[Form] = [partial(Voice.number, value=value)]
        if isinstance(value, int) and value >= 10**6 and value % 10**5 == 0:
            forms.append(partial(Voice.compact, value=value))
        yield forms


def percentages(draw: Random, shared: Shared) -> Values:
    for tenth in shuffled(draw, range(3000)):
        yield [partial(Voice.percent, value=Decimal(tenth) / 10)]


def sets_of_names(table: str, codes: Sequence[str], draw: Random) -> Values:
    """Lists of two to four names. The value is the set: no order of it is in another split."""
    for chosen in distinct(lambda: frozenset(codes[below(draw, len(codes))] for _ in range(2 + below(draw, 3)))) if codes else ():
        order = shuffled(draw, sorted(chosen))
        if len(order) > 1:
            yield [partial(Voice.names, table=table, codes=order, style=style) for style in ("standard", "or")]


FAMILIES: dict[str, Callable[[Random, Shared], Values]] = {
    "dates": dates,
    "times": times,
    "minutes": minutes,
    "durations": durations,
    "money": money,
    "units": units,
    "numbers": plain_numbers,
    "percentages": percentages,
    "countries": lambda draw, shared: sets_of_names("territories", shared.countries, draw),
    "tongues": lambda draw, shared: sets_of_names("languages", shared.tongues, draw),
}


def names(a: Voice, b: Voice) -> Iterator[Pair]:
    """Every name that both languages have: languages, countries, scripts, currencies, units, cities, months, days, time zones."""
    for table in ("languages", "territories", "scripts", "variants", "currency_names"):
        for code in sorted(set(a.data[table]) & set(b.data[table])):
            yield a.data[table][code], b.data[table][code]
    for unit in sorted(set(a.data["unit_display_names"]) & set(b.data["unit_display_names"])):
        x, y = a.data["unit_display_names"][unit], b.data["unit_display_names"][unit]
        yield x.get("long") or x.get("short", ""), y.get("long") or y.get("short", "")
    for table in ("months", "days", "quarters"):
        x, y = a.data[table]["stand-alone"]["wide"], b.data[table]["stand-alone"]["wide"]
        yield from ((x[key], y[key]) for key in sorted(x) if key in y)
    for zone in sorted(set(a.data["meta_zones"]) & set(b.data["meta_zones"])):
        x, y = a.data["meta_zones"][zone].get("long", {}), b.data["meta_zones"][zone].get("long", {})
        yield from ((x[key], y[key]) for key in ("generic", "standard", "daylight") if key in x and key in y)
    zones_a, zones_b = a.data["time_zones"], b.data["time_zones"]
    for zone in sorted(set(zones_a) | set(zones_b)):
        # CLDR: a city without a name of its own is called as the zone's identifier ends.
        own = zone.rpartition("/")[2].replace("_", " ")
        x, y = zones_a.get(zone, {}).get("city"), zones_b.get(zone, {}).get("city")
        if (x or y) and not zone.startswith("Etc/"):
            yield x or own, y or own


class Collector:
    """Takes pairs and refuses those that would make the corpus ambiguous or repeat it, counting each refusal."""

    def __init__(self, source: Voice, target: Voice) -> None:
        self.source, self.target = source, target
        self.known: dict[str, str] = {}
        self.left_out: Counter[str] = Counter()

    def take(self, source: str, target: str) -> Pair | None:
        """The pair with plain spaces, or None, and then it is counted."""
        source, target = " ".join(source.translate(SPACES).split()), " ".join(target.translate(SPACES).split())
        before = self.known.get(source)
        if not source or not target:
            self.left_out["CLDR has no words for it in one language"] += 1
        elif before is None:
            self.known[source] = target
            return source, target
        else:
            self.left_out["said before" if before == target else "the same source with another target"] += 1
        return None

    def say(self, form: Form) -> Pair | None:
        try:
            return self.take(form(self.source), form(self.target))
        except Unsaid:
            self.left_out["CLDR has no words for it in one language"] += 1
            return None


def sentences(values: Values, collector: Collector, draw: Random, held_out: int, train: int) -> tuple[list[Pair], ...]:
    """Training, validation and test pairs of one family: the first values are validation's, the next test's, the others training's.

    So the held-out pairs are the same however many training pairs are asked for. A held-out value is said once, in any of its forms.
    """
    splits: tuple[list[Pair], ...] = ([], [], [])
    for wanted, split, most in ((held_out, splits[1], 1), (held_out, splits[2], 1), (train, splits[0], FORMS_OF_A_VALUE)):
        while len(split) < wanted and (forms := next(values, None)) is not None:
            first = below(draw, len(forms))
            for form in [*forms[first:], *forms[:first]][: min(most, wanted - len(split))]:
                pair = collector.say(form)
                if pair:
                    split.append(pair)
    return splits


def pairs(source: str, target: str, *, limit: int, held_out: int) -> Made:
    """English-Italian, or any two of CLDR's languages, by their codes (en, pt_BR, zh_Hant).

    limit      training pairs at most; 0 makes all there are (MOST_PAIRS)
    held_out   pairs of validation and of test each; the same whatever `limit` is
    DataError where CLDR does not know a language, or too little of it. 120,000 pairs take about 4 s on one core.
    """
    if locale(source) == locale(target):
        raise DataError(f"source and target are both {source!r}", "data.source, data.target", "name two languages")
    collector = Collector(Voice(locale(source)), Voice(locale(target)))
    limit = limit or MOST_PAIRS
    dictionary = [pair for x, y in names(collector.source, collector.target) if (pair := collector.take(x, y))]
    train, validation, test = shuffled(Random("names"), dictionary)[: int(NAMES_AT_MOST * limit)], list[Pair](), list[Pair]()
    collector.left_out["names beyond their share of a small corpus"] = len(dictionary) - len(train)
    shared = Shared.of(collector.source, collector.target)
    draws = {family: Random(f"{family} {GENERATOR}") for family in FAMILIES}
    streams = {family: values(draws[family], shared) for family, values in FAMILIES.items()}
    for family, stream in list(streams.items()):
        first = next(stream, None)  # a family for which the languages share no words leaves its place to the others
        streams[family] = itertools.chain([first] if first else [], stream)
        if not first:
            del streams[family]
    shares = apportion(limit - len(train), streams)
    held_shares = apportion(held_out, streams.keys() - TRAINING_ONLY)
    for family, stream in streams.items():
        more = sentences(stream, collector, draws[family], held_shares.get(family, 0), shares[family])
        for split, new in zip((train, validation, test), more, strict=True):
            split += new
    if len(train) < min(limit, 1000) or (held_out and not (validation and test)):
        what = f"CLDR has too little in {source!r} and {target!r}: {len(train)} training and {len(validation)} held-out pairs"
        hint = "take languages that CLDR covers well, or a larger data.pairs"
        raise DataError(what, f"babel {babel.__version__}, data.source, data.target", hint)
    mixed = {name: shuffled(Random(name), split) for name, split in (("train", train), ("validation", validation), ("test", test))}
    return Made(**mixed, left_out={reason: n for reason, n in sorted(collector.left_out.items()) if n})


def apportion(total: int, families: Collection[str]) -> dict[str, int]:
    """`total` sentences dealt to `families` by MIXTURE, adding up to it: the largest remainders get the odd ones."""
    weights = {family: share for family, share in MIXTURE.items() if family in families}
    exact = {family: total * weight / sum(weights.values()) for family, weight in weights.items()}
    counts = {family: int(n) for family, n in exact.items()}
    for family in sorted(exact, key=lambda f: counts[f] - exact[f])[: total - sum(counts.values())]:
        counts[family] += 1
    return counts


def fingerprint(source: str, target: str, *, limit: int, held_out: int) -> str:
    """Hex sha256 of all that decides the pairs: the CLDR data of both languages, babel's and this file's version, the options."""
    digest = hashlib.sha256(f"cldr {GENERATOR} {babel.__version__} {source} {target} {limit} {held_out}".encode())
    folder = Path(localedata.__file__).parent
    for code in (source, target):
        parts = str(locale(code)).split("_")
        for count in range(1, len(parts) + 1):
            digest.update((folder / "locale-data" / f"{'_'.join(parts[:count])}.dat").read_bytes())
    return digest.hexdigest()
