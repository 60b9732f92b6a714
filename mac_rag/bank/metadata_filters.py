"""Conditions on the metadata of documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# Key -> a value, or a list of which one has to match.
Filters: TypeAlias = Mapping[str, Any]


def fits(metadata: Mapping[str, Any], filters: Filters) -> bool:
    """True if metadata have every key of the filters with its value, or with one of its list of values.

    Where the metadata have a list, one item has to match. Types count as in JSON: 1 is neither True nor 1.0.

    Examples:
        >>> fits({"year": 2005, "topics": ["press", "work"]}, {"year": [2004, 2005], "topics": "press"})
        True
        >>> fits({"year": 2005}, {"year": "2005"}), fits({}, {"year": 2005})
        (False, False)
    """
    return all(key in metadata and _matches(metadata[key], wanted) for key, wanted in filters.items())


def _matches(value: Any, wanted: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    choices = wanted if isinstance(wanted, list) else [wanted]
    # 1 and True are equal in Python, and not in JSON.
    return any(type(one) is type(other) and one == other for one in values for other in choices)
