"""Conditions on metadata: what they say holds, and what they cannot say is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data.metadata_filters import condition
from mac_rag.errors import ConfigError

STORM: dict[str, Any] = {"year": 2004, "topics": ["press", "work"], "by": "Ada", "date": "3 May 2004", "none": None}


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"year": 2004},
        {"year": [2003, 2004]},
        {"topics": "work"},
        {"none": None},
        {"year": {"$gte": 2000}},
        {"year": {"$gt": 2003, "$lt": 2004.5}},
        {"year": {"$lte": 2004}, "by": {"$ne": "Bo"}},
        {"by": {"$in": ["Ada", "Bo"]}},
        {"by": {"$nin": ["Bo"]}, "absent": {"$nin": ["x"]}},
        {"absent": {"$ne": 1}},
        {"topics": {"$contains": "press"}},
        {"absent": {"$exists": False}, "year": {"$exists": True}},
        {"by": {"$gte": "A", "$lt": "B"}},
        {"date": {"$gte": "2004-05", "$lt": "June 2004"}},
        {"date": {"$gt": date(2004, 5, 2)}},
        {"date": {"$lte": datetime(2004, 5, 3, tzinfo=UTC)}},
        {"$or": [{"year": 1990}, {"by": "Ada"}]},
        {"$and": [{"year": 2004}, {"$not": {"by": "Bo"}}]},
    ],
)
def test_what_holds(filters: dict[str, Any]) -> None:
    assert condition(filters)(STORM)
    assert not condition({"$not": filters})(STORM)


@pytest.mark.parametrize(
    "filters",
    [
        {"year": "2004"},
        {"year": True},
        {"absent": None},
        {"year": {"$gt": 2004}},
        {"absent": {"$gt": 2004}},
        {"none": {"$lte": 2004}},
        {"topics": {"$ne": "press"}},
        {"date": {"$lt": "1 May 2004"}},
        {"$or": [{"year": 1990}, {"by": "Bo"}]},
        {"$and": [{"year": 2004}, {"by": "Bo"}]},
    ],
)
def test_what_does_not_hold(filters: dict[str, Any]) -> None:
    assert not condition(filters)(STORM)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"by": {"$like": "A%"}}, r"\$like of 'by' in filters is not supported; choose one of \$eq, \$ne"),
        ({"by": {"$regex": "A"}}, r"\$regex"),
        ({"year": {"$gte": 2000, "to": 2005}}, r"to of 'year'"),
        ({"$nor": [{"year": 1}]}, r"'\$nor' in filters joins nothing"),
        ({"$or": []}, r"\$or in filters takes a list of filters, got \[\]"),
        ({"$and": {"year": 1}}, r"\$and in filters takes a list of filters"),
        ({"$not": [{"year": 1}]}, r"\$not in filters takes filters"),
        ({"$or": [{"year": 2004}, {"by": {"$ilike": "a"}}]}, r"\$ilike"),
        ({"by": {"$in": "Ada"}}, r"\$in of 'by' in filters takes a list, got 'Ada'"),
        ({"by": {"$eq": ["Ada"]}}, r"\$eq of 'by' in filters takes a single value"),
        ({"year": {"$gte": True}}, r"\$gte of 'year' in filters takes a number or a text, got True"),
        ({"year": {"$gte": None}}, r"takes a number or a text, got None"),
        ({"date": {"$gte": "soon"}}, r"\$gte of 'date' in filters takes a date, got 'soon'"),
        ({"year": {"$exists": 1}}, r"takes true or false, got 1"),
    ],
)
def test_what_cannot_be_said_is_refused_before_any_document_is_read(filters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        condition(filters)


@pytest.mark.parametrize(
    ("filters", "metadata"),
    [
        ({"year": {"$gte": 2000}}, {"year": "2004"}),  # as a CSV file has it
        ({"year": {"$gte": "2000"}}, {"year": 2004}),
        ({"year": {"$lt": 2000}}, {"year": ["x", 1990]}),
        ({"date": {"$gte": "2000"}}, {"date": "03/04/2004"}),
    ],
)
def test_values_of_two_kinds_are_not_compared(filters: dict[str, Any], metadata: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="compare values of one kind"):
        condition(filters)(metadata)


@given(st.integers(0, 9), st.integers(0, 9))
def test_operators_agree_with_each_other(value: int, limit: int) -> None:
    def holds(name: str) -> bool:
        return condition({"n": {name: limit}})({"n": value})

    assert holds("$gt") == (value > limit) == (not holds("$lte"))
    assert holds("$lt") == (value < limit) == (not holds("$gte"))
    assert holds("$eq") == (value == limit) == (not holds("$ne"))
