"""Rules of the published protocol for all benchmarks: which answer to train on, and how long a stream is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError


def shortest_first(answers: Iterable[str]) -> tuple[str, ...]:
    """The distinct answers that are not blank: the shortest first, then the others in their order."""
    distinct = list(dict.fromkeys(filter(None, map(str.strip, answers))))
    if distinct:
        shortest = min(distinct, key=len)
        distinct.remove(shortest)
        distinct.insert(0, shortest)
    return tuple(distinct)


def first_documents(dataset: QADataset, count: int) -> QADataset:
    """The first `count` documents of a stream, or all if there are fewer, with the questions that need no others.

    Raises:
        ConfigError: when documents would be left out, and a question names no document: it may be about one of these.
    """
    if count >= len(dataset.documents):
        return dataset
    if any(question.document_id is None for question in dataset.questions):
        raise ConfigError(
            f"the first {count:,} of {len(dataset.documents):,} documents are asked for, but the questions name no "
            "documents, and their answers may stand in the others; take all documents"
        )
    documents = dataset.documents[:count]
    ids = {document.id for document in documents}
    questions = tuple(
        question for question in dataset.questions if ids.issuperset((question.gold, *question.further_ids))
    )
    return replace(dataset, documents=documents, questions=questions)
