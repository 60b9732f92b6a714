"""Opens, reads and parses untrusted files: only regular files, and only within bounds.

All code that reads a bank, a retriever's folder, a checkpoint or a user's data uses this module. Any fault of the
content raises `MalformedError`, which the caller turns into an error that names the file and the remedy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

# Deepest nesting of lists and objects in JSON. Metadata of documents have a lower bound, because our files wrap them.
DEPTH = 72
METADATA_DEPTH = 64
# Most digits of a number in JSON: Python reads as many under every setting of its own limit for integers.
NUMBER = 640
# Most bytes of a text file that is one document.
DOCUMENT = 64 << 20
# Most bytes of a line of JSON Lines, or of a row of CSV.
ROW = 8 << 20
# Most lines of a row of CSV, and most blank lines before any row.
ROW_LINES = 200_000
# Most lists and objects in such a row. A row of nothing else would take 60 times its size in memory.
ROW_CONTAINERS = 200_000
_PIECE = 1 << 20
# A JSON string, complete or not, or the opening bracket of a list or an object.
_STRING_OR_OPENING = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]', re.DOTALL)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class MalformedError(ValueError):
    """A file that is not a regular file, or whose content its format does not allow."""


class NulError(MalformedError):
    """A NUL in a file that should be text: the file is binary, or has a hole where a text was."""


def open_file(path: Path, *, follow: bool = False) -> BufferedReader:
    """Opens a regular file for reading. Never blocks on anything else, such as a pipe.

    Args:
        path: the file.
        follow: True to follow a symbolic link. In the cache of the Hub, for example, all files are links.

    Raises:
        MalformedError: for a folder, a pipe, a device or a socket, and without `follow` also for a symbolic link.
        OSError: if there is no such file, or the system refuses it.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= 0 if follow else getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MalformedError(
                "it is a symbolic link, not a file" if not follow else "it is a loop of links"
            ) from None
        if error.errno == errno.ENXIO:
            raise MalformedError("it is a socket, not a file") from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise MalformedError(f"it is {kind}, not a file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """Reads a file of at most `limit` bytes.

    Raises:
        MalformedError: for a larger file, and as `open_file`.
        OSError: as `open_file`.
    """
    with open_file(path, follow=follow) as file:
        return file.read(_checked_size(file, limit))


def file_digest(path: Path) -> str:
    """Hex sha256 of a file of any size.

    Raises:
        MalformedError, OSError: as `open_file`.
    """
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text_bytes(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """As `read_file`, for a file of text. Refuses the file at its first NUL, which no text has and every hole has.

    Raises:
        MalformedError, OSError: as `read_file`.
    """
    with open_file(path, follow=follow) as file:
        _checked_size(file, limit)
        pieces: list[bytes] = []
        while piece := file.read(_PIECE):
            if b"\0" in piece:
                raise NulError(f"byte {len(pieces) * _PIECE + piece.index(0):,} is NUL, which no text has")
            pieces.append(piece)
    return b"".join(pieces)


def read_unpacked(path: Path, limit: int) -> bytes:
    """Reads a file of text, and unpacks it if its name ends in `.gz`; follows links.

    Raises:
        MalformedError: for more than `limit` bytes, packed or unpacked, for a `.gz` file that gzip did not pack, and as
            `read_text_bytes`.
        OSError: as `open_file`.
    """
    if path.suffix != ".gz":
        return read_text_bytes(path, limit, follow=True)
    packed, content = read_file(path, limit, follow=True), b""
    while packed:
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            content += member.decompress(packed, limit + 1 - len(content))
        except zlib.error as error:
            raise MalformedError(f"gzip did not pack it: {error}") from None
        if len(content) > limit:
            raise MalformedError(f"more than {limit:,} bytes when unpacked")
        if not member.eof:
            raise MalformedError("it ends in the middle")
        packed = member.unused_data.lstrip(b"\0")
    return content


def lines_of(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """The lines of a file with their line feeds, each of at most `limit` bytes.

    Raises:
        MalformedError: for a longer line, or one with a NUL; it names the line.
    """
    number, piece = 0, min(limit + 2, _PIECE)
    while begun := file.readline(piece):
        number += 1
        pieces, size = [begun], len(begun)
        while not pieces[-1].endswith(b"\n") and size <= limit and b"\0" not in pieces[-1]:
            pieces.append(file.readline(piece))
            size += len(pieces[-1])
            if not pieces[-1]:
                break
        line = b"".join(pieces)
        if b"\0" in line:
            raise NulError(f"line {number} has a NUL, which no text has")
        if len(line) - line.endswith(b"\n") > limit:
            raise MalformedError(f"line {number} has more than {limit:,} bytes")
        yield line


def parse_json(text: str | bytes, *, depth: int = DEPTH, containers: int | None = None) -> Any:
    """Parses JSON within bounds. Unlike `json.loads`, refuses NaN, infinity, and a name that comes twice in an object.

    Args:
        text: the JSON, as text or UTF-8.
        depth: deepest nesting of lists and objects.
        containers: most lists and objects; None for any number.

    Raises:
        MalformedError: for any other content; says what is wrong and, if the parser knows it, where.
    """
    try:
        if not isinstance(text, str):
            text = text.decode()
        most = text.count("[") + text.count("{")  # an upper bound, because brackets in strings are counted, too
        if containers is not None and most > containers:
            _check_containers(text, containers)
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise MalformedError(f"not JSON ({error.msg}, column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise MalformedError(f"not UTF-8 at byte {error.start:,}") from None
    except RecursionError:
        raise MalformedError(f"nested more than {depth} deep") from None
    if most > depth:
        _check_nesting(value, depth)
    return value


def read_json(path: Path, limit: int, *, follow: bool = False) -> Any:
    """Reads a file of JSON of at most `limit` bytes.

    Raises:
        MalformedError: as `read_text_bytes` and `parse_json`.
        OSError: as `open_file`.
    """
    return parse_json(read_text_bytes(path, limit, follow=follow))


def _checked_size(file: BinaryIO, limit: int) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise MalformedError(f"it has {size:,} bytes, and {limit:,} are the most")
    return size


def _check_containers(text: str, containers: int) -> None:
    openings = (match for match in _STRING_OR_OPENING.finditer(text) if not match[0].startswith('"'))
    if any(number == containers for number, _ in enumerate(openings)):
        raise MalformedError(f"more than {containers:,} lists and objects")


def _check_nesting(value: Any, depth: int) -> None:
    level = [value]
    for _ in range(depth):
        level = [item for each in level if isinstance(each, dict | list) for item in _items(each)]
        if not level:
            return
    raise MalformedError(f"nested more than {depth} deep")


def _items(container: dict[str, Any] | list[Any]) -> Iterator[Any]:
    items = container.values() if isinstance(container, dict) else container
    return (item for item in items if isinstance(item, dict | list))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise MalformedError(f"{name[:80]!r} comes twice in one object")
            seen.add(name)
    return content


def _integer(text: str) -> int:
    digits = len(text) - text.startswith("-")
    if digits > NUMBER:
        raise MalformedError(f"a number of {digits:,} digits, and {NUMBER} are the most; write it as a text")
    return int(text)


def _float(text: str) -> float:
    value = float(text) if len(text) - text.startswith("-") <= NUMBER else math.inf
    if math.isinf(value):
        raise MalformedError(f"{text[:40]!r} is not a number that can be read exactly")
    return value


def _constant(text: str) -> Any:
    raise MalformedError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant)


# Control characters (C0 with ESC, DEL, C1), separators that some programs take for line breaks, embeddings, overrides
# and isolates of the bidirectional algorithm, and halves of surrogate pairs, which cannot be printed at all.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, *, keep: str = "") -> str:
    r"""A text with its unsafe characters written as `\uXXXX`, as in JSON. JSON text keeps its meaning.

    Examples:
        >>> print(printable("red \x1b[31m and\nnew"))
        red \u001b[31m and\u000anew

    Args:
        text: the text, or an object such as a path or an error, which is converted to a text.
        keep: unsafe characters to keep, such as line breaks.
    """
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else f"\\u{ord(match[0]):04x}", str(text))
