"""Rules of the published protocol for all benchmarks: which answer to train on, and how long a stream is."""

from __future__ import annotations

from collections.abc import Iterable

from mac_rag.data.types import QADataset


def shortest_first(answers: Iterable[str]) -> tuple[str, ...]:
    """The distinct answers that are not blank: the shortest first, then the others in their order."""
    distinct = list(dict.fromkeys(filter(None, map(str.strip, answers))))
    if distinct:
        shortest = min(distinct, key=len)
        distinct.remove(shortest)
        distinct.insert(0, shortest)
    return tuple(distinct)


def first_documents(dataset: QADataset, count: int) -> QADataset:
    """The first `count` documents of a stream, or all if there are fewer, with their questions."""
    documents = dataset.documents[:count]
    ids = {document.id for document in documents}
    questions = tuple(question for question in dataset.questions if question.document_id in ids)
    return QADataset(dataset.name, dataset.split, documents, questions)
