"""What `mac-rag adapt --skip-bad` leaves out: files, rows and documents, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mac_rag.cli.terminal import say
from mac_rag.errors import MACError

if TYPE_CHECKING:
    from mac_rag.data.types import Document


class LeftOut:
    """Collects the errors of what is left out."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._places: dict[int, str] = {}  # file and row of each document, by its identity
        self._documents: list[Document] = []  # which keeps the identities
        self._bad_documents = 0

    def read(self, files: Iterable[Path]) -> list[Document]:
        """The documents of the files, without what is bad."""
        from mac_rag.data.readers import read_good_documents

        for place, document in read_good_documents(files, self.add):
            self._documents.append(document)
            self._places[id(document)] = place
        return self._documents

    def add(self, error: MACError) -> None:
        """Leaves out what an error says; it names file and row."""
        self._reasons.append(str(error))

    def add_document(self, document: Document, error: MACError) -> None:
        """Leaves out a document that was read, and cannot be adapted."""
        self._bad_documents += 1
        self._reasons.append(f"{self._places[id(document)]}: {error}")

    def show(self) -> None:
        """Lists it on standard error, at the end of the command.

        Raises:
            typer.Exit: with code 1, if nothing was good.
        """
        for reason in self._reasons:
            say(f"left out: {reason}", err=True, fg="yellow")
        if self._reasons:
            say(f"{len(self._reasons)} left out", err=True, fg="yellow")
            if len(self._documents) == self._bad_documents:
                raise typer.Exit(1)
