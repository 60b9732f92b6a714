"""What the engine tells of its work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdaptReport:
    """What a call of `adapt` did.

    Attributes:
        added, updated, unchanged: how many documents.
        rows: rows of memory tokens that were written.
        forgotten: ids of documents that went to make room in a bounded bank, or because they had been merged with one
            that was updated.
        filed: how many documents were written to the retriever.
    """

    added: int
    updated: int
    unchanged: int
    rows: int
    forgotten: tuple[str, ...] = ()
    filed: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer and what it was given from.

    Attributes:
        text: the answer.
        contexts: the documents that stood in front of the question, as they were used.
        document_ids: ids of the documents that the retriever found, best first.
        truncated: whether documents were shortened to fit the LM's window.
        discarded_prior: share of the document prior on documents that preselection left out; zero without it.
    """

    text: str
    contexts: tuple[str, ...]
    document_ids: tuple[str, ...]
    truncated: bool
    discarded_prior: float = 0.0
