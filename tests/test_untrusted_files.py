"""Files are read within bounds: kinds of files, sizes, lines, and JSON. Each bound is met exactly."""

from __future__ import annotations

import json
import os
import socket
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.atomic_files import write_file
from mac_rag.untrusted_files import (
    DEPTH,
    NUMBER,
    MalformedError,
    lines_of,
    open_file,
    parse_json,
    read_file,
    read_text_bytes,
)

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(value=VALUES)
def test_what_json_writes_is_read_as_json_reads_it(value: Any) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")], ids=["lists", "objects"])
def test_nesting_is_bounded(opening: str, closing: str) -> None:
    for levels in (1, DEPTH):
        parse_json(opening * levels + "1" + closing * levels)
    for levels in (DEPTH + 1, 500, 100_000):
        with pytest.raises(MalformedError, match=f"nested more than {DEPTH} deep"):
            parse_json(opening * levels + "1" + closing * levels)


def test_brackets_in_strings_are_no_nesting() -> None:
    assert parse_json(json.dumps("[{" * 1_000)) == "[{" * 1_000
    assert len(parse_json(json.dumps([[]] * 1_000))) == 1_000


def test_numbers_are_bounded_whatever_limit_python_has() -> None:
    before = sys.get_int_max_str_digits()
    try:
        for limit in (0, 640):
            sys.set_int_max_str_digits(limit)
            assert parse_json("7" * NUMBER) % 10 == 7
            assert parse_json("-" + "7" * NUMBER) == -parse_json("7" * NUMBER)
            assert parse_json("-0." + "5" * (NUMBER - 2)) < -0.5
            for digits in (NUMBER + 1, 5_000):
                for sign in ("", "-"):
                    with pytest.raises(MalformedError, match=f"a number of {digits:,} digits"):
                        parse_json(sign + "7" * digits)
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1e999", "'1e999' is not a number"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "'c' comes twice"),
        (b'"\xff"', "not UTF-8 at byte 1"),
        ("[1,]", "not JSON"),
        ("", "not JSON"),
        ("1 2", "not JSON"),
    ],
)
def test_what_is_not_json_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        parse_json(text)


def test_containers_can_be_bounded() -> None:
    assert len(parse_json("[[],[]]", containers=3)) == 2
    with pytest.raises(MalformedError, match="more than 2 lists and objects"):
        parse_json("[[],[]]", containers=2)
    # Those in strings do not count, and strings are found in linear time, whatever they hold.
    assert parse_json(r'{"[": "[[{\"[["}', containers=1) == {"[": '[[{"[['}
    with pytest.raises(MalformedError, match="more than 2 lists and objects"):
        parse_json(r'["\\",["]"],[]]', containers=2)
    with pytest.raises(MalformedError, match="not JSON"):
        parse_json('["' + r"\"[" * 200_000, containers=2)


def test_only_regular_files_are_opened_and_nothing_is_waited_for(tmp_path: Path) -> None:
    file, link, loop, pipe, sock = (tmp_path / name for name in ("file", "link", "loop", "pipe", "sock"))
    file.write_bytes(b"content")
    link.symlink_to(file)
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(sock))
        for path, kind in (
            (tmp_path, "a folder"), (pipe, "a named pipe"), (sock, "a socket"), (link, "a symbolic link"),
            (loop, "a symbolic link"), (Path("/dev/zero"), "a device"),
        ):  # fmt: skip
            with pytest.raises(MalformedError, match=f"it is {kind}, not a file"):
                open_file(path)
    assert open_file(link, follow=True).read() == open_file(file).read() == b"content"
    with pytest.raises(MalformedError, match="a loop of links"):
        open_file(loop, follow=True)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none")


def test_sizes_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_file(file, 5) == read_text_bytes(file, 5) == b"12345"
    os.truncate(file, 1 << 40)
    for read in (read_file, read_text_bytes):
        with pytest.raises(MalformedError, match="it has 1,099,511,627,776 bytes, and 5 are"):
            read(file, 5)
    with pytest.raises(MalformedError, match="byte 5 is NUL"):
        read_text_bytes(file, 1 << 41)


@given(lines=st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"").replace(b"\0", b""))))
def test_lines_are_read_as_a_file_reads_them(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    assert list(lines_of(BytesIO(data), 12)) == list(BytesIO(data))


@pytest.mark.parametrize("size", [12, 3 << 20])
def test_lines_are_bounded(size: int) -> None:
    assert len(next(lines_of(BytesIO(b"x" * size + b"\n"), size))) == size + 1
    for end in (b"", b"\n"):
        with pytest.raises(MalformedError, match=f"line 2 has more than {size:,} bytes"):
            list(lines_of(BytesIO(b"x\n" + b"x" * (size + 1) + end), size))
    with pytest.raises(MalformedError, match="line 1 has a NUL"):
        list(lines_of(BytesIO(b"x\0\n"), size))


def test_writing_never_follows_a_link_that_lies_in_the_way(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    for kind in ("link", "pipe"):
        leftover = tmp_path / "file.new"
        leftover.symlink_to(precious) if kind == "link" else os.mkfifo(leftover)
        write_file(tmp_path / "file", [b"content"])
        assert (tmp_path / "file").read_bytes() == b"content"
    assert precious.read_bytes() == b"precious"
