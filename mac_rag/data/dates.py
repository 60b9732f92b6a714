"""Dates of documents and questions: read in the forms that people write, kept as microseconds since 1970 in UTC."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from itertools import product
from typing import Any, Final, TypeAlias

from dateutil import tz
from dateutil.parser import isoparse, parse

from mac_rag.errors import DataError
from mac_rag.untrusted_files import METADATA_DEPTH

ALWAYS: Final = -(1 << 63)  # the moment of a document without a date: before all others
LAST: Final = (1 << 63) - 1  # the moment after all others
REMEDY = (
    "write it in ISO 8601, such as 2004-05-31 or 2004-05-31T18:30:00+02:00, or in seconds since 1970, such as "
    "@1085961600"
)

AsOf: TypeAlias = "str | int | date | datetime | None"  # the moment of a question, as `read_date` takes it

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LONGEST = 200  # characters; the parser takes long for long texts
_HYPHENS = str.maketrans("\u2010\u2011\u2212", "---")
_EPOCH_NUMBER = re.compile(
    r"@(?P<seconds>-?\d{1,15}(?:\.\d{1,9})?)|/Date\((?P<thousandths>-?\d{1,18})(?:[+-]\d{4})?\)/"
)
_YEAR_MONTH = re.compile(r"\d{6}")
_OTHER_YEARS = re.compile(r"^[+-]\d|^\d{5,}-|(?<!\d)0000-\d|\bB\.?C", re.IGNORECASE)
# (Central European Summer Time), CEST: what JavaScript, mails and Go add after an offset.
_REMARK = re.compile(r"\s*\([^()]{0,80}\)$|(?<=[+-]\d{4}) [A-Z]{2,5}$")
_PLACE = re.compile(r"\s*\[?\b([A-Z][A-Za-z_]*(?:/[A-Za-z0-9_+-]+)+)\]?$")
_NAMED_OFFSET = re.compile(r"(?<=[\d\s])\s*(?:UTC?|GMT)\s?(?=[+-]\d)")
_DAY_WITH_ZONE = re.compile(r"^(\d{4}-\d\d-\d\d)(Z|[+-]\d\d:\d\d)$")
_DAY_OF_YEAR = re.compile(r"\d{4}-?\d{3}")
# A year of four digits comes before month and day, whatever the signs between them: nobody writes day and month then.
_YEAR_FIRST = re.compile(r"^(\d{4})[-/.: 年년]\s?(\d{1,2})(?:[-/.: 月월]\s?(\d{1,2}))?[月월日일]?(?=$|[T\s,])")
_LOG = re.compile(r"(?<=/\d{4}):(?=\d\d:)")  # 28/May/2004:10:00:00, as servers write it
_SEVERAL = re.compile(r"Z\s*[+-]\d|\d{4}-\d\d.*[^\d.]\d{4}-\d\d")  # two zones, or two dates
# Names that mean one time zone, with its hours from UTC; those of RFC 2822 mean one only in the date of a mail.
_ZONES = {"UT": 0, "WET": 0, "WEST": 1, "CET": 1, "CEST": 2, "EET": 2, "EEST": 3, "JST": 9} | {
    "AEST": 10, "AEDT": 11, "NZST": 12, "NZDT": 13
}  # fmt: skip
_MAIL_ZONES = {"EST": -5, "EDT": -4, "CST": -6, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7}
_MAIL = re.compile(r"(?:[A-Z][a-z]{2}, )?\d{1,2} [A-Z][a-z]{2} \d{4} \d\d:\d\d")
_NAMED_YEAR = re.compile(r"(?<![\w.,$£€-])(?:1\d{3}|20\d{2})(?![\w-]|[.,]\d)")  # not part of a number
# The parser takes missing fields from a default date. Parsing with two defaults shows which fields are missing.
_FIRST, _SECOND = datetime(1, 1, 1), datetime(2, 2, 2)


def read_date(value: Any) -> datetime:
    """Reads a date as a moment in UTC.

    ISO 8601 is tried first: a day, a moment, a week. Then dates with the month as a word, such as `31 May 2004` and
    those in mails and of JavaScript, and others that can be read in only one way. A year, a month or a day stands for
    its first moment. A date without a time zone is in UTC. `UTC+2` is two hours ahead of UTC; `@1085961600` are seconds
    since 1970.

    Args:
        value: a text, a year from 1000 to 9999 as a number, or a date or datetime of Python.

    Raises:
        DataError: for a value that is not a date, that can be read in two ways, such as 03/04/2004, that has no year,
            or whose time zone has a name of several zones; names the value and the remedy.

    Examples:
        >>> read_date("2004-05").isoformat()
        '2004-05-01T00:00:00+00:00'
        >>> read_date("31 May 2004 18:30 +0200").isoformat()
        '2004-05-31T16:30:00+00:00'
    """
    if isinstance(value, datetime) and value == value:  # pandas has a datetime that is none
        moment = value
    elif isinstance(value, date) and not isinstance(value, datetime):
        moment = datetime(value.year, value.month, value.day)
    elif type(value) is int and 1000 <= value <= 9999:
        moment = datetime(value, 1, 1)
    elif isinstance(value, str) and value.strip() and len(value) <= _LONGEST:
        moment = _read(value.strip())
    else:
        raise DataError(f"{value!r:.80} is no date; {REMEDY}")
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:
        raise DataError(f"{value!r:.80} is before the year 1 or after 9999 in UTC; {REMEDY}") from None


def moment_of(value: Any) -> int:
    """`read_date` in microseconds since 1970.

    Raises:
        DataError: as `read_date`.
    """
    return (read_date(value) - _EPOCH) // _MICROSECOND


def moment_of_question(as_of: AsOf) -> int | None:
    """`moment_of` the `as_of` of a question; None for all dates.

    Raises:
        DataError: as `read_date`.
    """
    return None if as_of is None else moment_of(as_of)


def named_in(question: str) -> int | None:
    """The last moment of the latest year that a question names, in microseconds since 1970; None if it names none.

    A year is a number from 1000 to 2099 that stands alone.

    Examples:
        >>> written(named_in("Who led Kestrel between 1998 and 2004?") + 1)
        '2005-01-01'
        >>> named_in("Now: who leads it?") is None
        True
    """
    years = years_in(question)
    return moment_of(max(years) + 1) - 1 if years else None


def years_in(text: str) -> list[int]:
    """The years that a text names, in its order: numbers from 1000 to 2099 that stand alone.

    Examples:
        >>> years_in("Of the 1200 in 1998, and $1500 more, 3 were left in 1999.")
        [1200, 1998, 1999]
    """
    return [int(year) for year in _NAMED_YEAR.findall(text)]


def written(moment: int) -> str:
    """Writes a moment, as `moment_of` returns it, in ISO 8601; only the day if it is the beginning of one.

    Examples:
        >>> written(moment_of("2004-05"))
        '2004-05-01'
    """
    found = _EPOCH + moment * _MICROSECOND
    is_day = not (found.hour or found.minute or found.second or found.microsecond)
    return found.date().isoformat() if is_day else found.isoformat()


def with_written_dates(value: Any, depth: int = METADATA_DEPTH) -> Any:
    """A value, or its copy with dates and times of Python as texts in ISO 8601, also in lists and mappings.

    Args:
        value: the value.
        depth: how deep in lists and mappings.

    Examples:
        >>> with_written_dates({"date": date(2004, 5, 31)})
        {'date': '2004-05-31'}
    """
    if isinstance(value, date | time) and value == value:
        return value.isoformat()
    if isinstance(value, Mapping) and depth:
        items = {name: with_written_dates(item, depth - 1) for name, item in value.items()}
        return value if all(items[name] is item for name, item in value.items()) else items
    if isinstance(value, list | tuple) and depth:
        made = [with_written_dates(item, depth - 1) for item in value]
        return value if all(one is other for one, other in zip(value, made, strict=True)) else made
    return value


def date_in(metadata: Mapping[str, Any]) -> datetime | None:
    """The `date` of a document's metadata; None if there is none, or an empty one.

    Raises:
        DataError: as `read_date`.
    """
    value = metadata.get("date")
    return None if value is None or (isinstance(value, str) and not value.strip()) else read_date(value)


def superseded_in(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids in `supersedes` of a document's metadata, each once.

    Raises:
        DataError: if it is neither an id nor a list of ids.
    """
    value = metadata.get("supersedes")
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        raise DataError(f"supersedes is {value!r:.80}; give an id of a document, or a list of ids")
    return tuple(dict.fromkeys(names))


def _read(text: str) -> datetime:
    plain = unicodedata.normalize("NFKC", text).translate(_HYPHENS).strip()
    if epoch := _EPOCH_NUMBER.fullmatch(plain):
        return _since_epoch(epoch["seconds"] or epoch["thousandths"], 0 if epoch["seconds"] else 3)
    if _YEAR_MONTH.fullmatch(plain):
        raise DataError(f"the date {text!r} can be a month, or a day of this century; {REMEDY}")
    if _OTHER_YEARS.search(plain):
        raise DataError(f"the date {text!r:.80} is before the year 1 or after 9999; {REMEDY}")
    plain, place = _with_place(text, plain)
    moment = _read_plain(text, plain)
    if place is None or moment.tzinfo is not None:
        return moment
    if tz.datetime_ambiguous(moment, place) or not tz.datetime_exists(moment, place):
        raise DataError(f"the date {text!r:.80} is in an hour in which clocks were changed; {REMEDY}")
    return moment.replace(tzinfo=place)


def _with_place(text: str, plain: str) -> tuple[str, tzinfo | None]:
    """A date without the names and remarks that follow its zone, and the zone of a place such as Europe/Paris."""
    plain = _REMARK.sub("", plain)
    named = _PLACE.search(plain)
    if named is None:
        return plain, None
    place = tz.gettz(named[1])
    if place is None:
        raise DataError(f"{named[1]!r:.80} in the date {text!r:.80} is no time zone; {REMEDY}")
    return plain[: named.start()], place


def _read_plain(text: str, plain: str) -> datetime:
    # The parser takes the offset of `GMT+2` for the opposite, as POSIX has it; everyone else means `+02:00`.
    plain = _NAMED_OFFSET.sub("", plain)
    plain = _DAY_WITH_ZONE.sub(r"\1T00:00\2", plain)
    plain, year_first = _YEAR_FIRST.subn(_padded, _LOG.sub(" ", plain))
    if _SEVERAL.search(plain):
        raise DataError(f"{text!r:.80} is more than one date, or has two time zones; {REMEDY}")
    try:
        return isoparse(plain)
    except ValueError:
        pass
    try:
        if _DAY_OF_YEAR.fullmatch(plain):
            return datetime.strptime(plain.replace("-", ""), "%Y%j")
        zones = _mail_zone if _MAIL.match(plain) else _zone
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the parser warns of unknown time zones
            readings = {
                parse(plain, default=_FIRST, dayfirst=day_first, yearfirst=year_first, tzinfos=zones)
                for day_first, year_first in ([(False, True)] if year_first else product((False, True), repeat=2))
            }
            other = parse(plain, default=_SECOND, tzinfos=lambda *_: UTC)
    except (ValueError, OverflowError, Warning) as error:
        detail = f": {error}" if isinstance(error, _ZoneError) else ""
        raise DataError(f"{text!r:.80} is no date that can be read{detail}; {REMEDY}") from None
    if len(readings) > 1:
        raise DataError(f"the date {text!r:.80} can be read in several ways; {REMEDY}")
    [reading] = readings
    year_stands = re.search(rf"(?<!\d){reading.year:04}", plain)  # two digits do not tell the century
    if (other.year, other.month) != (reading.year, reading.month) or not year_stands:
        raise DataError(f"the date {text!r:.80} lacks its year (of four digits) or its month; {REMEDY}")
    return reading


def _padded(match: re.Match[str]) -> str:
    return "-".join(part.zfill(2) for part in match.groups() if part)


def _since_epoch(number: str, exponent: int) -> datetime:
    """The moment so many seconds, divided by 10^exponent, after 1970 began."""
    try:
        return _EPOCH + timedelta(microseconds=int(Decimal(number).scaleb(6 - exponent)))
    except OverflowError:
        raise DataError(f"{number[:40]} since 1970 is before the year 1 or after 9999; {REMEDY}") from None


class _ZoneError(ValueError):
    """A name that several time zones share."""


def _zone(name: str | None, offset: int | None) -> tzinfo | None:
    if name is not None and offset is None and name.upper() in _ZONES:
        return tz.tzoffset(None, 3600 * _ZONES[name.upper()])
    if name is not None and name.upper() not in ("UTC", "GMT", "Z"):
        raise _ZoneError(f"{name!r} is no name of a single time zone; write its offset")
    return None if offset is None else tz.tzoffset(None, offset)


def _mail_zone(name: str | None, offset: int | None) -> tzinfo | None:
    """The zone of a date in a mail, for which RFC 2822 says what its names mean."""
    hours = None if name is None or offset is not None else _MAIL_ZONES.get(name)
    return _zone(name, offset) if hours is None else tz.tzoffset(None, 3600 * hours)
