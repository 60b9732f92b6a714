"""Dates of documents and of questions: read from what people write, kept as microseconds since 1970 in UTC."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, Final, TypeAlias

from dateutil import tz
from dateutil.parser import isoparse, parse

from mac_rag.errors import DataError

ALWAYS: Final = -(1 << 63)  # the moment of what has no date: before all others
LAST: Final = (1 << 63) - 1  # the moment after all others
REMEDY = "write it in ISO 8601, such as 2004-05-31 or 2004-05-31T18:30:00+02:00"

AsOf: TypeAlias = "str | int | date | datetime | None"  # the moment of a question, as `read_date` takes it

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_YEAR_MONTH = re.compile(r"\d{6}")
_NAMED_YEAR = re.compile(r"(?<![\w.,$£€-])(?:1\d{3}|20\d{2})(?![\w-]|[.,]\d)")  # in a question, not part of a number
_YEAR = re.compile(r"(?<!\d)\d{4}(?!\d)")  # one of two digits is of this century or of another
# What is not written is taken from these. Where the two differ, so does what is read.
_FIRST, _SECOND = datetime(1, 1, 1), datetime(2, 2, 2)


def read_date(value: Any) -> datetime:
    """The moment that a date stands for, in UTC.

    ISO 8601 is tried first: a day, a moment, a week. Then dates with the month as a word, as in `31 May 2004` and in
    mails, and others that can be read in one way only. A bare year or month is its first moment, as a day is; without a
    time zone it is UTC.

    Args:
        value: a text, a year from 1000 to 9999 as a number, or a date or datetime of Python.

    Raises:
        DataError: for what is no date, for one that can be read in two ways, as 03/04/2004, for one without a year, and
            for a time zone that is a name of several; names the value and the remedy.

    Examples:
        >>> read_date("2004-05").isoformat()
        '2004-05-01T00:00:00+00:00'
        >>> read_date("31 May 2004 18:30 +0200").isoformat()
        '2004-05-31T16:30:00+00:00'
    """
    if isinstance(value, datetime):
        found = value
    elif isinstance(value, date):
        found = datetime(value.year, value.month, value.day)
    elif type(value) is int and 1000 <= value <= 9999:
        found = datetime(value, 1, 1)
    elif isinstance(value, str) and value.strip():
        found = _read(value.strip())
    else:
        raise DataError(f"{value!r:.80} is no date; {REMEDY}")
    try:
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
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
    """A moment of `moment_of` in ISO 8601; a day alone where it is the beginning of one.

    Examples:
        >>> written(moment_of("2004-05"))
        '2004-05-01'
    """
    found = _EPOCH + moment * _MICROSECOND
    is_day = not (found.hour or found.minute or found.second or found.microsecond)
    return found.date().isoformat() if is_day else found.isoformat()


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
        DataError: for anything but an id or a list of ids.
    """
    value = metadata.get("supersedes")
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        raise DataError(f"supersedes names documents by an id or a list of ids, got {value!r:.80}")
    return tuple(dict.fromkeys(names))


def _read(text: str) -> datetime:
    if _YEAR_MONTH.fullmatch(text):
        raise DataError(f"the date {text!r} can be a month or a day of 20..; {REMEDY}")
    try:
        return isoparse(text)
    except ValueError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of time zones that are not understood
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
    [found] = readings
    if (other.year, other.month) != (found.year, found.month) or not _YEAR.search(text):
        raise DataError(f"the date {text!r:.80} lacks its year, of four digits, or its month; {REMEDY}")
    return found


class _ZoneError(ValueError):
    """A time zone whose name several zones have."""


def _zone(name: str | None, offset: int | None) -> tzinfo | None:
    if offset is not None:
        return tz.tzoffset(None, offset)
    if name in ("UTC", "GMT", "Z"):
        return UTC
    if name is not None:
        raise _ZoneError(f"the time zone {name!r} can be several; write its offset")
    return None
