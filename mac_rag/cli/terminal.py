"""What commands print. Nothing that a document, a file name or a message contains can control the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from mac_rag.printable import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def say(text: object, *, lines: bool = False, err: bool = False, **style: Any) -> None:
    """Prints a line.

    Args:
        text: the text.
        lines: True for a text of several lines, such as an answer: line breaks and tabs in it work.
        err: True to print on standard error.
        style: as `typer.style` takes it.
    """
    typer.secho(printable(text, keep="\n\t" if lines else ""), err=err, **style)


def cell(text: object) -> Text:
    """A cell of a table: the text as it is, without markup."""
    from rich.text import Text

    return Text(printable(text))


def show_table(table: Table, *, width: int | None = None) -> None:
    """Prints a table of `cell`s; `width` is the number of columns, None for that of the terminal."""
    from rich.console import Console

    Console(width=width).print(table)
