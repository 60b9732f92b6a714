"""Dates of documents and questions: read in the forms that people write, kept as microseconds since 1970 in UTC."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, Final, TypeAlias

from dateutil import tz
from dateutil.parser import isoparse, parse

from mac_rag.errors import DataError

ALWAYS: Final = -(1 << 63)  # the moment of a document without a date: before all others
LAST: Final = (1 << 63) - 1  # the moment after all others
REMEDY = "write it in ISO 8601, such as 2004-05-31 or 2004-05-31T18:30:00+02:00"

AsOf: TypeAlias = "str | int | date | datetime | None"  # the moment of a question, as `read_date` takes it

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_YEAR_MONTH = re.compile(r"\d{6}")
_NAMED_YEAR = re.compile(r"(?<![\w.,$£€-])(?:1\d{3}|20\d{2})(?![\w-]|[.,]\d)")  # in a question, not part of a number
_YEAR = re.compile(r"(?<!\d)\d{4}(?!\d)")  # four digits, because two digits do not tell the century
# The parser takes missing fields from a default date. Parsing with two defaults shows which fields are missing.
_FIRST, _SECOND = datetime(1, 1, 1), datetime(2, 2, 2)


def read_date(value: Any) -> datetime:
    """Reads a date as a moment in UTC.

    ISO 8601 is tried first: a day, a moment, a week. Then dates with the month as a word, such as `31 May 2004` and
    those in mails, and others that can be read in only one way. A year, a month or a day stands for its first moment. A
    date without a time zone is in UTC.

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
    if isinstance(value, datetime):
        moment = value
    elif isinstance(value, date):
        moment = datetime(value.year, value.month, value.day)
    elif type(value) is int and 1000 <= value <= 9999:
        moment = datetime(value, 1, 1)
    elif isinstance(value, str) and value.strip():
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
    years = [int(year) for year in _NAMED_YEAR.findall(question)]
    return moment_of(max(years) + 1) - 1 if years else None


def written(moment: int) -> str:
    """Writes a moment, as `moment_of` returns it, in ISO 8601; only the day if it is the beginning of one.

    Examples:
        >>> written(moment_of("2004-05"))
        '2004-05-01'
    """
    time = _EPOCH + moment * _MICROSECOND
    is_day = not (time.hour or time.minute or time.second or time.microsecond)
    return time.date().isoformat() if is_day else time.isoformat()


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
    if _YEAR_MONTH.fullmatch(text):
        raise DataError(f"the date {text!r} can be a month, or a day of this century; {REMEDY}")
    try:
        return isoparse(text)
    except ValueError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the parser warns of unknown time zones
            readings = {
                parse(text, default=_FIRST, dayfirst=day_first, yearfirst=year_first, tzinfos=_zone)
                for day_first in (False, True)
                for year_first in (False, True)
            }
            other = parse(text, default=_SECOND, tzinfos=_zone)
    except (ValueError, OverflowError, Warning) as error:
        detail = f": {error}" if isinstance(error, _ZoneError) else ""
        raise DataError(f"{text!r:.80} is no date that can be read{detail}; {REMEDY}") from None
    if len(readings) > 1:
        raise DataError(f"the date {text!r:.80} can be read in several ways; {REMEDY}")
    [reading] = readings
    if (other.year, other.month) != (reading.year, reading.month) or not _YEAR.search(text):
        raise DataError(f"the date {text!r:.80} lacks its year (of four digits) or its month; {REMEDY}")
    return reading


class _ZoneError(ValueError):
    """A name that several time zones share."""


def _zone(name: str | None, offset: int | None) -> tzinfo | None:
    if offset is not None:
        return tz.tzoffset(None, offset)
    if name in ("UTC", "GMT", "Z"):
        return UTC
    if name is not None:
        raise _ZoneError(f"several time zones are called {name!r}; write its offset")
    return None
