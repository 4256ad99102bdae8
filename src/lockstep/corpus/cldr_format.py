"""Format dates, times, numbers, amounts, durations and lists in one language, by Unicode CLDR.

babel has such functions, but looks up the patterns at each call, which is two to four times slower.
Where babel does not implement CLDR, the method documents it; tests compare the rest with babel.
"""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Any

import babel
from babel import Locale, localedata, numbers

from lockstep.errors import DataError

SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " "})
LETTER_BY_DIGIT = re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])")
Parts = list[tuple[int, str]]  # (how many, unit), largest unit first


class MissingCldrData(LookupError):
    """CLDR has no data for this value in one of the two languages."""


class LocaleFormatter:
    """Formats values in one language, with caches. Raises MissingCldrData."""

    def __init__(self, locale: Locale) -> None:
        self.locale = locale
        self.data: Any = plain(locale._data)
        # The same numbers and times occur in many values.
        self.format_number = cache(self._format_number)
        self.format_time = cache(self._format_time)
        self.plural_form = cache(locale.plural_form)
        # In CLDR, a pattern that is missing in "long" equals the one in "short".
        self.unit_patterns = {}
        for unit, of in self.data["unit_patterns"].items():
            short = of.get("short", {})
            self.unit_patterns[unit] = {"short": short, "long": short | of.get("long", {})}

    def _format_number(self, value: int | Decimal) -> str:
        return str(
            self.locale.decimal_formats[None].apply(value, self.locale, decimal_quantization=False)
        )

    def format_compact(self, value: int) -> str:
        """3.2 million. With up to three decimals, so that no language has to round: 1.05 crore."""
        if "long" not in self.data["compact_decimal_formats"]:
            raise MissingCldrData
        return numbers.format_compact_decimal(
            value, format_type="long", locale=self.locale, fraction_digits=3
        )

    def format_percent(self, value: Decimal) -> str:
        return str(
            self.locale.percent_formats[None].apply(
                value / 100, self.locale, decimal_quantization=False
            )
        )

    def plural_pattern(self, patterns: dict[str, str], value: int | Decimal) -> str:
        """Return the pattern for the plural form of `value`, or else the form "other"."""
        pattern = patterns.get(self.plural_form(value)) or patterns.get("other")
        if not pattern:
            raise MissingCldrData
        return pattern

    def format_unit(self, value: int | Decimal, unit: str, length: str) -> str:
        """3 meters. `length`: long or short."""
        patterns = self.unit_patterns.get(unit, {}).get(length, {})
        return self.plural_pattern(patterns, value).replace("{0}", self.format_number(value))

    def format_duration(self, parts: Parts, length: str, style: str) -> str:
        """3 hours and 5 minutes"""
        return self.format_list(
            [self.format_unit(n, f"duration-{unit}", length) for n, unit in parts], style
        )

    def format_relative(self, value: int, unit: str, length: str, direction: str) -> str:
        """in 3 days, 3 days ago. `direction`: future or past; `length`: empty or -short."""
        fields = self.data["date_fields"]
        patterns = fields.get(unit + length) or fields.get(unit, {})
        return self.plural_pattern(patterns.get(direction, {}), value).replace(
            "{0}", self.format_number(value)
        )

    def format_currency_name(self, value: int | Decimal, currency: str) -> str:
        """12.50 US dollars. Whole amounts have no decimals, others those of the currency."""
        cents = isinstance(value, Decimal)
        return numbers.format_currency(
            value, currency, locale=self.locale, format_type="name", currency_digits=cents
        )

    def format_currency(self, value: int | Decimal, currency: str) -> str:
        """$12.50, EUR 12.50. With currencySpacing (UTS 35, part 3), which babel lacks."""
        return LETTER_BY_DIGIT.sub(
            " ",
            self.locale.currency_formats["standard"].apply(value, self.locale, currency=currency),
        )

    def format_date(self, value: dt.date, style: str) -> str:
        """July 3, 2024. `style`: full, long, medium, short, or a CLDR skeleton such as yMMMEd."""
        pattern = self.data["date_formats"].get(style) or self.data["datetime_skeletons"].get(style)
        if pattern is None:
            raise MissingCldrData
        return str(pattern.apply(value, self.locale))

    def _format_time(self, value: dt.time, style: str) -> str:
        return str(self.locale.time_formats[style].apply(value, self.locale))

    def format_datetime(self, day: dt.date, time: dt.time, style: str) -> str:
        pattern = str(self.data["datetime_formats"][style]).replace("'", "")
        return pattern.replace("{0}", self.format_time(time, "short")).replace(
            "{1}", self.format_date(day, style)
        )

    def format_names(self, table: str, codes: Sequence[str], style: str) -> str:
        """Italy, France, and Chad"""
        return self.format_list([self.data[table][code] for code in codes], style)

    def format_list(self, items: Sequence[str], style: str) -> str:
        """Format a list (UTS 35, part 2). Patterns that a style lacks are those of "standard"."""
        styles = self.data["list_patterns"]
        patterns: dict[str, str] = {**styles["standard"], **styles.get(style, {})}
        if len(items) == 2:
            return patterns["2"].format(*items)
        text = items[0]
        for number, item in enumerate(items[1:], start=1):
            name = "start" if number == 1 else "middle"
            if number == len(items) - 1:
                name = "end"
            text = patterns[name].format(text, item)
        return text


def plain(value: Any) -> Any:
    """Convert babel's lazy dictionaries to dicts: lookups dominate the cost of formatting."""
    return (
        {key: plain(value[key]) for key in value}
        if isinstance(value, localedata.LocaleDataDict)
        else value
    )


def locale(code: str) -> Locale:
    """Return babel's locale. DataError with the nearest codes if CLDR lacks the language."""
    identifiers = {name.lower(): name for name in localedata.locale_identifiers()}
    name = identifiers.get(code.lower().replace("-", "_"))
    if name is None:
        english = {
            word.lower(): key
            for key, word in Locale.parse("en").languages.items()
            if key.lower() in identifiers
        }
        near = difflib.get_close_matches(code.lower(), [*identifiers, *english], n=4, cutoff=0.6)
        codes = list(dict.fromkeys(identifiers.get(word) or english[word] for word in near))
        raise DataError(
            f"CLDR has no language {code!r}",
            f"babel {babel.__version__}, data.source, data.target",
            f"did you mean {', '.join(codes)}?"
            if codes
            else "languages are codes such as en, it, de, pt_BR, zh_Hant",
        )
    parsed = Locale.parse(name)
    if parsed.months["format"]["wide"][1] == "M01":  # CLDR's fallback for a language without data
        raise DataError(
            f"CLDR has no month names in {code!r}, so no sentences can be generated",
            f"babel {babel.__version__}, data.source, data.target",
            "use a language that CLDR covers well",
        )
    return parsed
