"""JSON in SQuAD's layout, of any size: `{"data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [...]}]}]}`.

The articles are read one by one, so that only one of them is in memory.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from mac_rag.errors import DataError
from mac_rag.untrusted_files import JSONStream, MalformedError, open_file

_ARTICLE = 64 << 20  # characters of one article

Rows = Iterator[tuple[str, dict[str, Any]]]


def paragraph_rows(path: Path) -> Rows:
    """Yields the questions of a file, plain or gzipped, as rows with `document`, `title` and what SQuAD has in `qas`.

    A paragraph without questions is a row without `question`. Each row comes with its place for messages.

    Raises:
        DataError: for a file that cannot be read, is no JSON or has another layout; names the file, article and
            paragraph.
    """
    for number, article in enumerate(_articles(path), 1):
        place = f"{path}, article {number}"
        title = _field(article, "title", str, place) if "title" in _object(article, place) else None
        for position, paragraph in enumerate(_field(article, "paragraphs", list, place), 1):
            where = f"{place}, paragraph {position}"
            shared = {"document": _field(paragraph, "context", str, where), "title": title}
            questions = _field(paragraph, "qas", list, where)
            if not questions:
                yield where, shared
            for index, question in enumerate(questions, 1):
                name = f"{where}, question {index}"
                _field(question, "question", str, name)
                yield name, {**question, **shared}


def _articles(path: Path) -> Iterator[Any]:
    try:
        with open_file(path, follow=True) as raw, _unpacked(path, raw) as file:
            yield from _elements(JSONStream(file, _ARTICLE))
    except MalformedError as error:
        raise DataError(f"{path} is no JSON in SQuAD's layout: {error}") from None
    except (OSError, EOFError, zlib.error) as error:  # OSError also for what is no gzip
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw


def _elements(stream: JSONStream) -> Iterator[Any]:
    """The elements of the list `data` of an object."""
    stream.take("{")
    names: list[str] = []
    while stream.next_character() != "}":
        name = stream.value()
        if not isinstance(name, str) or name in names:
            raise MalformedError(f"{name!r:.80} is no name of a value, or comes twice")
        names.append(name)
        stream.take(":")
        if name == "data":
            stream.take("[")
            while stream.next_character() != "]":
                yield stream.value()
                if stream.next_character() != "]":
                    stream.take(",")
            stream.take("]")
        else:
            stream.value()
        if stream.next_character() != "}":
            stream.take(",")
    stream.take("}")
    if stream.next_character():
        raise MalformedError("it goes on after its end; name a file of JSON Lines .jsonl")
    if "data" not in names:
        raise MalformedError(f"it has no 'data' but {', '.join(map(repr, names)) or 'nothing':.200}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: not a JSON object but {type(value).__name__}")
    return value


def _field(value: Any, name: str, kind: type, where: str) -> Any:
    content = _object(value, where)
    if not isinstance(content.get(name), kind):
        got = f"got {content[name]!r:.80}" if name in content else f"it has {', '.join(map(repr, content)):.200}"
        raise DataError(f"{where}, field {name!r}: it must be a {'text' if kind is str else 'list'}; {got}")
    return content[name]
