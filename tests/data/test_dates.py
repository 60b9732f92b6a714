"""Dates are read as they are meant, or refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

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
        ("Fri, 28 May 2004 10:00:00 EST", "several time zones are called 'EST'"),
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
    assert len(str(refused.value)) < 300
    with pytest.raises(BankError, match="metadata of document 'd'"):
        Member.of(Document("d", "A text.", {"date": value}))


@given(MOMENTS)
def test_a_moment_is_read_back_exactly(moment: datetime) -> None:
    assert read_date(moment.isoformat()) == moment
    assert read_date(written(moment_of(moment))) == moment


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
