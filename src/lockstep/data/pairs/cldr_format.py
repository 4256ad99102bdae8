"""One language as Unicode CLDR speaks it: a day, a price, a length of time or a list, said in its words and patterns.

babel carries CLDR and has functions for all of this, but each call looks up its patterns anew, which is two to four times slower; here
they are looked up once. Where babel stops short of CLDR we follow CLDR, and the docstrings say so; elsewhere tests compare the two.
"""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import babel
from babel import Locale, localedata, numbers

from lockstep.errors import DataError

SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " "})
LETTER_BY_DIGIT = re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])")
Parts = list[tuple[int, str]]  # (how many, unit), largest unit first


class Unsaid(LookupError):
    """CLDR has no words for this in one of the two languages."""


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
        """3.2 million; in languages that count by other powers, with up to three places: 1.05 crore, so that nothing is rounded."""
        if "long" not in self.data["compact_decimal_formats"]:
            raise Unsaid
        return numbers.format_compact_decimal(value, format_type="long", locale=self.locale, fraction_digits=3)

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


def locale(code: str) -> Locale:
    """babel's locale for `code`. DataError, with the nearest codes, when CLDR has no such language or nothing in it."""
    known = {name.lower(): name for name in localedata.locale_identifiers()}
    name = known.get(code.lower().replace("-", "_"))
    if name is None:
        english = {word.lower(): key for key, word in Locale.parse("en").languages.items() if key.lower() in known}
        near = difflib.get_close_matches(code.lower(), [*known, *english], n=4, cutoff=0.6)
        codes = list(dict.fromkeys(known.get(word) or english[word] for word in near))
        what = f"CLDR knows no language {code!r}"
        hint = f"did you mean {', '.join(codes)}?" if codes else "languages are codes such as en, it, de, pt_BR, zh_Hant"
        raise DataError(what, f"babel {babel.__version__}, data.source, data.target", hint)
    found = Locale.parse(name)
    if found.months["format"]["wide"][1] == "M01":  # what CLDR's root says where a language has nothing of its own
        what = f"CLDR has no month names in {code!r}, so no sentences can be made"
        raise DataError(what, f"babel {babel.__version__}, data.source, data.target", "take a language that CLDR covers well")
    return found
