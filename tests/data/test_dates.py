"""Dates are read as they are meant, or refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data.dates import ALWAYS, moment_of, moment_of_question, read_date, written
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DataError

MOMENTS = st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-9, minutes=-30))])).filter(
    lambda moment: 1 < moment.year < 9999
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2004", "2004-01-01"),
        (2004, "2004-01-01"),
        ("2004-05", "2004-05-01"),
        ("2004-05-31", "2004-05-31"),
        ("20040531", "2004-05-31"),
        ("2004-W10", "2004-03-01"),
        ("2004-05-31T24:00", "2004-06-01"),
        ("2004-05-31 18:30:00+02:00", "2004-05-31T16:30:00+00:00"),
        ("2004-05-31T18:30Z", "2004-05-31T18:30:00+00:00"),
        (" 31 May 2004 ", "2004-05-31"),
        ("May 2004", "2004-05-01"),
        ("May 31, 2004 18:30 +0200", "2004-05-31T16:30:00+00:00"),
        ("Fri, 28 May 2004 10:00:00 GMT", "2004-05-28T10:00:00+00:00"),
        ("31/05/2004", "2004-05-31"),
        (date(2004, 5, 31), "2004-05-31"),
        (datetime(2004, 5, 31, 18, 30), "2004-05-31T18:30:00+00:00"),
        ("1066-10-14", "1066-10-14"),
        ("0044-03-15", "0044-03-15"),
        ("2004-150", "2004-05-29"),
        ("2004W103", "2004-03-03"),
        ("20040531183000", "2004-05-31T18:30:00+00:00"),
        ("2004-05-31+02:00", "2004-05-30T22:00:00+00:00"),
        ("2004-05-31-05:00", "2004-05-31T05:00:00+00:00"),
        ("2004-05-31 18:30 \u221202:00", "2004-05-31T20:30:00+00:00"),
        ("2004-05-31T18:30:00.123456789Z", "2004-05-31T18:30:00.123456+00:00"),
        ("2004/5/6 7:08", "2004-05-06T07:08:00+00:00"),
        ("2004.05.06", "2004-05-06"),
        ("2004:05:31 18:30:00", "2004-05-31T18:30:00+00:00"),
        ("1999 06", "1999-06-01"),
        ("06/1999", "1999-06-01"),
        ("2004年5月31日", "2004-05-31"),
        ("2004년 5월 31일", "2004-05-31"),
        ("２００４-０５-３１", "2004-05-31"),
        ("Mon May 31 2004 18:30:00 GMT-0500 (Colombia Standard Time)", "2004-05-31T23:30:00+00:00"),
        ("5/31/2004, 6:30:00\u202fPM", "2004-05-31T18:30:00+00:00"),
        ("Fri, 28 May 2004 10:00:00 EDT", "2004-05-28T14:00:00+00:00"),
        ("Fri, 28 May 2004 10:00:00 -0500 (EST)", "2004-05-28T15:00:00+00:00"),
        ("Fri May 28 10:00:00 CEST 2004", "2004-05-28T08:00:00+00:00"),
        ("2004-05-31 18:30:00 +0900 JST", "2004-05-31T09:30:00+00:00"),
        ("28/May/2004:10:00:00 +0200", "2004-05-28T08:00:00+00:00"),
        ("2004-05-31T18:30+02:00[Europe/Paris]", "2004-05-31T16:30:00+00:00"),
        ("2004-12-31 18:30 America/New_York", "2004-12-31T23:30:00+00:00"),
        ("@1085961600.5", "2004-05-31T00:00:00.500000+00:00"),
        ("/Date(1085961600000+0200)/", "2004-05-31"),
    ],
)
def test_what_a_date_stands_for(value: object, expected: str) -> None:
    assert written(moment_of(value)) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("03/04/2004", "several ways"),
        ("04.05.2004", "several ways"),
        ("200405", "can be a month, or a day"),
        ("31 May 99", "lacks its year"),
        ("May 3", "lacks its year"),
        ("10:30", "lacks its year"),
        ("2004-05-31 10:00:00 EST", "'EST' is no name of a single time zone"),
        ("2004-05-31 18:30 EST+5", "'EST' is no name of a single time zone"),
        ("2004-05-31T18:30:00Z+03:00", "two time zones"),
        ("2004-05-31/2004-06-02", "more than one date"),
        ("2004-10-31 02:30 Europe/Paris", "clocks were changed"),
        ("2004-03-28 02:30 Europe/Paris", "clocks were changed"),
        ("2004-05-31 18:30 Mars/Olympus", "no time zone"),
        ("31 May 99 18:30 +0200", "lacks its year"),
        ("-0044-03-15", "before the year 1"),
        ("44 BC", "before the year 1"),
        ("+012004-05-31T00:00:00Z", "after 9999"),
        ("12004-05-31", "after 9999"),
        ("@99999999999999", "after 9999"),
        ("1085961600", "no date"),
        ("spring 2004", "no date"),
        ("2004-13-01", "no date"),
        ("9" * 5000, "no date"),
        ("0001-01-01T00:00+05:00", "before the year 1"),
        (20040531, "no date"),
        (True, "no date"),
        (1085961600.0, "no date"),
        (["2004"], "no date"),
    ],
)
def test_what_is_refused(value: object, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as refused:
        read_date(value)
    assert "ISO 8601" in str(refused.value)
    assert len(str(refused.value)) < 400
    with pytest.raises(BankError, match="metadata of document 'd'"):
        Member.of(Document("d", "A text.", {"date": value}))


@given(MOMENTS)
def test_a_moment_is_read_back_exactly(moment: datetime) -> None:
    assert read_date(moment.isoformat()) == moment
    assert read_date(written(moment_of(moment))) == moment


@given(
    st.datetimes(datetime(1000, 1, 2), datetime(9998, 12, 30)).map(lambda moment: moment.replace(microsecond=0)),
    st.integers(-14 * 60, 14 * 60),
    st.sampled_from(
        [
            "%Y-%m-%dT%H:%M:%S{}",
            "%Y-%m-%d %H:%M:%S {}",
            "%Y-%m-%d %H:%M:%S UTC{}",
            "%Y-%m-%d %I:%M:%S %p UTC{}",
            "%Y/%m/%d %H:%M:%S GMT{}",
            "%a %b %d %Y %H:%M:%S GMT{} (Some Standard Time)",
            "%a, %d %b %Y %H:%M:%S {}",
            "%B %d, %Y, %H:%M:%S {}",
            "%Y%m%dT%H%M%S{}",
        ]
    ),
    st.sampled_from(["", ":"]),
)
def test_an_offset_is_ahead_of_utc_in_every_form(moment: datetime, minutes: int, form: str, colon: str) -> None:
    zone = timezone(timedelta(minutes=minutes))
    offset = f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}{colon}{abs(minutes) % 60:02}"
    # strftime does not pad years everywhere, but all years here have four digits.
    assert read_date(moment.strftime(form).format(offset)) == moment.replace(tzinfo=zone)


@given(MOMENTS, MOMENTS)
def test_moments_are_ordered_as_dates_are(first: datetime, second: datetime) -> None:
    assert (moment_of(first) < moment_of(second)) == (first < second)
    assert moment_of(first) > ALWAYS


@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_a_date_a_document_counts_from_its_adaptation_on(value: object) -> None:
    document = Document("d", "A text.", {"date": value})
    assert document.date is None
    member = Member.of(document)
    assert member.moment == moment_of(member.added)
    assert moment_of_question(None) is None


def test_what_an_old_bank_holds_there_says_nothing() -> None:
    old = Member("d", "hash", {"date": "spring", "supersedes": {"no": "id"}}, "2020-01-02T03:04:05+00:00")
    assert old.moment == moment_of("2020-01-02T03:04:05")
    assert old.supersedes == ()
    assert Member("d", "hash", {}, "today").moment == ALWAYS


def test_which_documents_another_supersedes() -> None:
    assert Document("d", "", {"supersedes": "a"}).supersedes == ("a",)
    assert Document("d", "", {"supersedes": ["b", "a", "b"]}).supersedes == ("b", "a")
    for value in ({"a": 1}, ["a", 3], 7, [" "]):
        with pytest.raises(BankError, match="metadata of document 'd': supersedes is"):
            Member.of(Document("d", "A text.", {"supersedes": value}))


def test_dates_of_python_in_metadata_are_kept_as_texts() -> None:
    metadata = {
        "date": date(2004, 5, 31),
        "read": [datetime(2004, 6, 1, 7, 30, tzinfo=timezone(timedelta(hours=2))), {"at": time(12, 0)}],
        "title": "Bridges",
    }
    document = Document("d", "A text.", metadata)
    kept = Member.of(document).metadata
    assert kept == {
        "date": "2004-05-31",
        "read": ["2004-06-01T07:30:00+02:00", {"at": "12:00:00"}],
        "title": "Bridges",
    }
    assert document.metadata == kept
    assert moment_of(document.date) == moment_of("2004-05-31")
    assert Document("d", "A text.", kept).metadata is kept  # nothing is copied without need


def test_a_missing_date_of_pandas_is_refused() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match="NaT is no date"):
        read_date(pandas.NaT)
    with pytest.raises(BankError, match="metadata of document 'd'"):
        Member.of(Document("d", "A text.", {"seen": pandas.NaT}))
