"""Output of commands. Nothing that a document, a file name or a message contains can control the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from mac_rag.untrusted_files import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from mac_rag.data.types import Answer, Source


def say(text: object, *, lines: bool = False, err: bool = False, **style: Any) -> None:
    """Prints a line.

    Args:
        text: the text.
        lines: True for a text of several lines, such as an answer: line breaks and tabs in it are kept.
        err: True to print on standard error.
        style: as `typer.style` takes it.
    """
    typer.secho(printable(text, keep="\n\t" if lines else ""), err=err, **style)


def cell(text: object) -> Text:
    """A cell of a table: the text as it is; markup in it has no effect."""
    from rich.text import Text

    return Text(printable(text))


def show_table(table: Table, *, width: int | None = None) -> None:
    """Prints a table of `cell`s. `width`: its width in characters; None for that of the terminal."""
    from rich.console import Console

    Console(width=width).print(table)


# Most sources that commands show.
SHOWN = 5


def show_sources(sources: Sequence[Source], answer: str) -> None:
    """Prints a table of sources. In the sentence of each source, the answer's words are bold and underlined."""
    from rich.table import Table

    from mac_rag.sources import source_record

    quoted = any(source.sentence for source in sources)
    dates = [source_record(source)["date"] or "" for source in sources]
    table = Table("attention", "document", *["date"] * any(dates), *["sentence"] * quoted)
    for source, date in zip(sources, dates, strict=True):
        row = [cell("" if source.share is None else f"{source.share:.1%}"), cell(source.document_id)]
        row += [cell(date)] * any(dates)
        row += [_highlighted(source.sentence or "", answer)] * quoted
        table.add_row(*row)
    show_table(table)


def answer_record(answer: Answer) -> dict[str, Any]:
    """An answer as `mac-rag ask --json` prints it."""
    from mac_rag.sources import source_record

    return {
        "answer": answer.text,
        "confidence": answer.confidence,
        "guess": answer.guess,
        "truncated": answer.truncated,
        "sources": [source_record(source, answer.said) for source in answer.sources],
    }


def _highlighted(sentence: str, answer: str) -> Text:
    from mac_rag.sources import highlights

    text = cell(sentence)
    for start, end in highlights(text.plain, answer):
        text.stylize("bold underline", start, end)
    return text
