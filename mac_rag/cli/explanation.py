"""Which documents an answer came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mac_rag.cli.terminal import cell, show_table

if TYPE_CHECKING:
    from mac_rag.engine import MACEngine


def show_attention(engine: MACEngine, question: str, as_of: str | None = None, shown: int = 5) -> None:
    """Prints a table of the documents of the bank with the most attention."""
    from rich.table import Table

    ids, mass = engine.document_attention([question], as_of=as_of)
    table = Table("attention", "document")
    for i in mass[0].argsort(descending=True)[:shown].tolist():
        table.add_row(f"{float(mass[0, i]):.1%}", cell(ids[i]))
    show_table(table)
