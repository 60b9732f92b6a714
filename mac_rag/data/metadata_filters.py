"""Conditions on the metadata of documents."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any, TypeAlias

from mac_rag.data.characters import shown
from mac_rag.data.dates import read_date, with_written_dates
from mac_rag.errors import ConfigError, DataError

# Key -> a value, a list of which one has to match, or operators with their operands.
Filters: TypeAlias = Mapping[str, Any]
Condition: TypeAlias = Callable[[Mapping[str, Any]], bool]

_ORDERS = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
_OPERATORS = ("$eq", "$ne", *_ORDERS, "$in", "$nin", "$contains", "$exists")
_JOINS = ("$and", "$or", "$not")


def condition(filters: Filters) -> Condition:
    """A test of metadata: True for those that have every key of the filters with its value, or one of its values.

    Where the metadata have a list, one item has to match. Types count as in JSON: 1 is neither True nor 1.0. In place
    of a value stand operators, as in MongoDB: `$eq`, `$ne`, `$gt`, `$gte`, `$lt`, `$lte`, `$in`, `$nin`, `$contains`,
    `$exists`. `$and`, `$or` (lists of filters) and `$not` join filters. `$ne` and `$nin` also hold without the key.
    The key `date` is compared as dates.

    Raises:
        ConfigError: for another operator, or an operand that it does not take. The test raises it for a value that
            cannot be compared with the operand, such as a text with a number.

    Examples:
        >>> fits = condition({"year": [2004, 2005], "topics": "press"})
        >>> fits({"year": 2005, "topics": ["press", "work"]}), fits({"year": "2005"}), fits({})
        (True, False, False)
        >>> since = condition({"$or": [{"year": {"$gte": 2004, "$lt": 2010}}, {"date": {"$gte": "May 2004"}}]})
        >>> since({"year": 2005}), since({"year": 2011}), since({"date": "2004-06-01"})
        (True, False, True)
    """
    return _all([_part(key, wanted) for key, wanted in with_written_dates(filters).items()])


def _all(tests: Sequence[Condition]) -> Condition:
    return lambda metadata: all(test(metadata) for test in tests)


def _part(key: str, wanted: Any) -> Condition:
    if key in _JOINS:
        return _joined(key, wanted)
    if not isinstance(key, str) or key.startswith("$"):
        raise ConfigError(f"{key!r:.80} in filters joins nothing; give a key of the metadata, or {', '.join(_JOINS)}")
    if not isinstance(wanted, Mapping) or not any(str(name).startswith("$") for name in wanted):
        return lambda metadata: key in metadata and _matches(metadata[key], wanted)
    return _all([_compared(key, name, operand) for name, operand in wanted.items()])


def _joined(name: str, wanted: Any) -> Condition:
    parts = [wanted] if name == "$not" else wanted
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, Mapping) for part in parts):
        kind = "filters" if name == "$not" else "a list of filters"
        raise ConfigError(f"{name} in filters takes {kind}, got {wanted!r:.80}")
    tests = [condition(part) for part in parts]
    if name == "$or":
        return lambda metadata: any(test(metadata) for test in tests)
    return _all(tests) if name == "$and" else lambda metadata: not tests[0](metadata)


def _compared(key: str, name: str, operand: Any) -> Condition:
    """The test that an operator makes of the value of a key."""
    where = f"{name} of {shown(key)} in filters"
    if name not in _OPERATORS:
        raise ConfigError(f"{where} is not supported; choose one of {', '.join(_OPERATORS)}")
    if name == "$exists":
        if not isinstance(operand, bool):
            raise ConfigError(f"{where} takes true or false, got {operand!r:.80}")
        return lambda metadata: (key in metadata) is operand
    if (name in ("$in", "$nin")) != isinstance(operand, list | tuple):
        kind = "a list" if name in ("$in", "$nin") else "a single value"
        raise ConfigError(f"{where} takes {kind}, got {operand!r:.80}")
    if name in ("$eq", "$in", "$contains"):
        return lambda metadata: key in metadata and _matches(metadata[key], operand)
    if name in ("$ne", "$nin"):
        return lambda metadata: key not in metadata or not _matches(metadata[key], operand)
    ordered = _ordered(key, operand)
    if ordered is None:
        raise ConfigError(f"{where} takes {'a date' if key == 'date' else 'a number or a text'}, got {operand!r:.80}")
    sort, limit = ordered
    compare = _ORDERS[name]

    def holds(value: Any) -> bool:
        found = _ordered(key, value)
        if found is None or found[0] is not sort:
            raise ConfigError(
                f"{where} compares {operand!r:.80} with {value!r:.80} of a document; compare values of one kind"
            )
        return bool(compare(found[1], limit))

    def test(metadata: Mapping[str, Any]) -> bool:
        value = metadata.get(key)
        return value is not None and any(holds(each) for each in (value if isinstance(value, list) else [value]))

    return test


def _ordered(key: str, value: Any) -> tuple[type, Any] | None:
    """What a value is compared as, by its key, and what of it is compared; None if it has no order."""
    if key == "date":
        try:
            return date, read_date(value)
        except DataError:
            return None
    if type(value) in (int, float):
        return float, value
    return (str, value) if isinstance(value, str) else None


def _matches(value: Any, wanted: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    choices = wanted if isinstance(wanted, list | tuple) else [wanted]
    # 1 and True are equal in Python, and not in JSON.
    return any(type(one) is type(other) and one == other for one in values for other in choices)
