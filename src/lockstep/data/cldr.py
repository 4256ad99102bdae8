"""A parallel corpus that needs no download: Unicode CLDR, as the package `babel` carries it, said in two languages.

CLDR's people have vetted the names of languages, countries, currencies, units and cities, and the patterns for dates, times, amounts of
money, durations and lists, in several hundred languages. A name is a pair by itself. A *value* (a day, an amount of money, a set of
countries) becomes a pair when both languages say it, so there are as many sentences as one likes, and each of them is right.

    family -> values -> forms of a value (said long, said short, ...) -> (source, target)

The held-out split is by value: a value's sentences lie all in one of training, validation and test, so that a held-out sentence's value
was never seen in any form. Names are a dictionary, which nobody can guess: they are all in training, and never asked for by themselves.

Nothing here depends on the clock, the machine or the order of a set. Randomness is `random.Random(text).random()` only, the one method
whose numbers Python promises to keep. CLDR writes no-break and thin spaces where one types a space; all become plain spaces.
"""

from __future__ import annotations

import datetime as dt
import difflib
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import babel
from babel import Locale, languages, localedata, numbers
from babel.core import get_global

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

SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " "})
LETTER_BY_DIGIT = re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])")
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
Parts = list[tuple[int, str]]
Form = Callable[["Voice"], str]
Values = Iterator[list[Form]]


class Unsaid(LookupError):
    """CLDR has no words for this in one of the two languages."""


@dataclass(frozen=True)
class Made:
    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> pairs


class Voice:
    """One language: says values as CLDR has it. Raises Unsaid where CLDR has no words. Remembers numbers, which come again and again."""

    def __init__(self, locale: Locale) -> None:
        self.locale = locale
        self.data: Any = plain(locale._data)
        self.decimal = locale.decimal_formats[None]
        self.numbers: dict[int | Decimal, str] = {}
        self.plurals: dict[int | Decimal, str] = {}
        self.clocks: dict[tuple[dt.time, str], str] = {}
        self.lists: dict[str, dict[str, str]] = {}
        # CLDR, and so babel, leaves out of "long" what is as in "short".
        self.unit_patterns = {
            unit: {"short": of.get("short", {}), "long": {**of.get("short", {}), **of.get("long", {})}}
            for unit, of in self.data["unit_patterns"].items()
        }

    def number(self, value: int | Decimal) -> str:
        if value not in self.numbers:
            self.numbers[value] = str(self.decimal.apply(value, self.locale, decimal_quantization=False))
        return self.numbers[value]

    def compact(self, value: int) -> str:
        """3.2 million"""
        if "long" not in self.data["compact_decimal_formats"]:
            raise Unsaid
        return numbers.format_compact_decimal(value, format_type="long", locale=self.locale, fraction_digits=1)

    def percent(self, value: Decimal) -> str:
        pattern = self.locale.percent_formats[None]
        return str(pattern.apply(value / 100, self.locale, decimal_quantization=False))

    def plural(self, patterns: dict[str, str], value: int | Decimal) -> str:
        """The pattern for `value` by its plural form; the form "other" stands in for those that are missing."""
        if value not in self.plurals:
            self.plurals[value] = self.locale.plural_form(value)
        pattern = patterns.get(self.plurals[value]) or patterns.get("other")
        if not pattern:
            raise Unsaid
        return pattern

    def unit(self, value: int | Decimal, unit: str, length: str) -> str:
        """`length` is long or short."""
        patterns = self.unit_patterns.get(unit, {}).get(length, {})
        return self.plural(patterns, value).replace("{0}", self.number(value))

    def span(self, parts: Parts, length: str, style: str) -> str:
        """3 hours and 5 minutes"""
        return self.join([self.unit(n, f"duration-{unit}", length) for n, unit in parts], style)

    def relative(self, value: int, unit: str, length: str, direction: str) -> str:
        """in 3 days, 3 days ago: `direction` is future or past, `length` empty or -short."""
        known = self.data["date_fields"]
        patterns = known.get(unit + length) or known.get(unit, {})
        return self.plural(patterns.get(direction, {}), value).replace("{0}", self.number(value))

    def money(self, value: int | Decimal, currency: str) -> str:
        """12.50 US dollars: whole amounts without decimals, others with the currency's."""
        cents = {"currency": currency} if isinstance(value, Decimal) else {}
        amount = self.decimal.apply(value, self.locale, **cents)
        plurals = self.data["currency_names_plural"].get(currency) or {"other": self.data["currency_names"][currency]}
        name = self.plural(plurals, value)
        return self.plural(self.data["currency_unit_patterns"], value).format(amount, name)

    def price(self, value: int | Decimal, currency: str) -> str:
        """$12.50, EUR 12.50: letters beside a digit get a space (UTS 35, part 3, currencySpacing; babel leaves it out)."""
        return LETTER_BY_DIGIT.sub(" ", self.locale.currency_formats["standard"].apply(value, self.locale, currency=currency))

    def day(self, value: dt.date, style: str) -> str:
        """`style` is full, long, medium, short, or one of CLDR's skeletons such as yMMMEd."""
        pattern = self.data["date_formats"].get(style) or self.data["datetime_skeletons"].get(style)
        if pattern is None:
            raise Unsaid
        return str(pattern.apply(value, self.locale))

    def clock(self, value: dt.time, style: str) -> str:
        if (value, style) not in self.clocks:
            self.clocks[value, style] = str(self.locale.time_formats[style].apply(value, self.locale))
        return self.clocks[value, style]

    def moment(self, day: dt.date, time: dt.time, style: str) -> str:
        glue = str(self.data["datetime_formats"][style]).replace("'", "")
        return glue.replace("{0}", self.clock(time, "short")).replace("{1}", self.day(day, style))

    def names(self, table: str, codes: Sequence[str], style: str) -> str:
        """Italy, France, and Chad"""
        return self.join([self.data[table][code] for code in codes], style)

    def join(self, items: Sequence[str], style: str) -> str:
        """A list as CLDR writes it (UTS 35, part 2, List Patterns). What a style leaves out is as in "standard"."""
        if style not in self.lists:
            known = self.data["list_patterns"]
            self.lists[style] = {**known["standard"], **known.get(style, {})}
        patterns = self.lists[style]
        if len(items) == 2:
            return patterns["2"].format(*items)
        text = items[0]
        for i, item in enumerate(items[1:], start=2):
            text = patterns["start" if i == 2 else "end" if i == len(items) else "middle"].format(text, item)
        return text


def plain(value: Any) -> Any:
    """`value` with babel's lazy dictionaries as ordinary ones: looking things up is most of the work here."""
    return {key: plain(value[key]) for key in value} if isinstance(value, localedata.LocaleDataDict) else value


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
    def amount() -> tuple[int | Decimal, str]:
        kind, currency = draw.random(), shared.currencies[below(draw, len(shared.currencies))]
        if kind < 0.45:
            return Decimal(101 + below(draw, 99_899)) / 100, currency
        return 1 + below(draw, 999 if kind < 0.8 else 99_999), currency

    for value, currency in distinct(amount) if shared.currencies else ():
        if value == int(value):
            value = int(value)
        yield [partial(form, value=value, currency=currency) for form in (Voice.money, Voice.price)]


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
    if len(train) < min(limit, 1000) or not validation or not test:
        raise DataError(
            f"CLDR has too little in {source!r} and {target!r}: {len(train)} training and {len(validation)} held-out pairs",
            f"babel {babel.__version__}, data.source, data.target",
            "take languages that CLDR covers well, or a larger data.pairs",
        )
    mixed = {name: shuffled(Random(name), split) for name, split in (("train", train), ("validation", validation), ("test", test))}
    return Made(**mixed, left_out=dict(sorted(collector.left_out.items())))


def apportion(total: int, families: Collection[str]) -> dict[str, int]:
    """`total` sentences dealt to `families` by MIXTURE, adding up to it: the largest remainders get the odd ones."""
    weights = {family: share for family, share in MIXTURE.items() if family in families}
    exact = {family: total * weight / sum(weights.values()) for family, weight in weights.items()}
    counts = {family: int(n) for family, n in exact.items()}
    for family in sorted(exact, key=lambda f: counts[f] - exact[f])[: total - sum(counts.values())]:
        counts[family] += 1
    return counts


def locale(code: str) -> Locale:
    """babel's locale for `code`. DataError, with the nearest codes, when CLDR has no such language or nothing in it."""
    known = {name.lower(): name for name in localedata.locale_identifiers()}
    name = known.get(code.lower().replace("-", "_"))
    if name is None:
        english = {word.lower(): key for key, word in Locale.parse("en").languages.items() if key.lower() in known}
        near = difflib.get_close_matches(code.lower(), [*known, *english], n=4, cutoff=0.6)
        codes = list(dict.fromkeys(known.get(word) or english[word] for word in near))
        raise DataError(
            f"CLDR knows no language {code!r}",
            f"babel {babel.__version__}, data.source, data.target",
            f"did you mean {', '.join(codes)}?" if codes else "languages are codes such as en, it, de, pt_BR, zh_Hant",
        )
    found = Locale.parse(name)
    if found.months["format"]["wide"][1] == "M01":  # what CLDR's root says where a language has nothing of its own
        raise DataError(
            f"CLDR has no month names in {code!r}, so no sentences can be made",
            f"babel {babel.__version__}, data.source, data.target",
            "take a language that CLDR covers well",
        )
    return found


def fingerprint(source: str, target: str, *, limit: int, held_out: int) -> str:
    """Hex sha256 of all that decides the pairs: the CLDR data of both languages, babel's and this file's version, the options."""
    digest = hashlib.sha256(f"cldr {GENERATOR} {babel.__version__} {source} {target} {limit} {held_out}".encode())
    folder = Path(localedata.__file__).parent
    for code in (source, target):
        parts = str(locale(code)).split("_")
        for count in range(1, len(parts) + 1):
            digest.update((folder / "locale-data" / f"{'_'.join(parts[:count])}.dat").read_bytes())
    return digest.hexdigest()
