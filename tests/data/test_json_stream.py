"""Values of a JSON file one by one: equal to the parser's, however the file is read, and bounded."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mac_rag import untrusted_files
from mac_rag.untrusted_files import JSONStream, MalformedError
from tests.torture.mutations import little_memory

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def values(data: bytes, limit: int = 1 << 20) -> list[Any]:
    """The elements of a list."""
    stream, found = JSONStream(io.BytesIO(data), limit), []
    stream.take("[")
    while stream.next_character() != "]":
        found.append(stream.value())
        if stream.next_character() != "]":
            stream.take(",")
    stream.take("]")
    assert stream.next_character() == ""
    return found


@example([0.5, 1e-7, -12, 1e300], 1, False)
@given(st.lists(VALUES, max_size=5), st.sampled_from([1, 2, 3, 7, 64]), st.booleans())
def test_values_are_those_of_the_parser(content: list[Any], piece: int, indented: bool) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=2 if indented else None)
    text = re.sub("[\ud800-\udfff]", "?", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrusted_files, "_PIECE", piece)
        assert values(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[1, ", "it ends too early|not JSON"),
        (b'["' + b"x" * 5_000, "value of more than 1,000 characters"),
        (b"[" + b" " * 5_000, "value of more than 1,000 characters"),
        (b'["\xff"]', "not UTF-8"),
        (b'["\0"]', "NUL"),
        (b"[1 2]", "',' expected, got '2'"),
        (b"[" + b"[" * 200_000, "nested more than 72 deep|more than 1,000 characters"),
        (b"[" + b"[" * 80 + b"]" * 80 + b"]", "nested more than 72 deep"),
        (b'[{"a": 1, "a": 2}]', "'a' comes twice"),
    ],
)
def test_what_is_beyond_the_bounds_is_refused(monkeypatch: pytest.MonkeyPatch, data: bytes, message: str) -> None:
    monkeypatch.setattr(untrusted_files, "_PIECE", 256)
    with little_memory(), pytest.raises(MalformedError, match=message):
        values(data, 1_000)
