"""Documents that contradict what is known: older than the news, or with an answer that was put into them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

from mac_rag.data.metrics import normalize
from mac_rag.data.types import Document, QADataset, Question

Kind = Literal["outdated", "counterfactual"]

_DRAWS = 20  # wrong answers tried for one question


@dataclass(frozen=True)
class Conflict:
    """A question, the document that answers it, and one that answers it wrongly.

    Attributes:
        kind: `outdated` (the wrong document was right once) or `counterfactual`.
        question: with the right answers.
        right: text of the document that holds the right answer.
        wrong: text of the other.
        wrong_answer: what that one says.
    """

    kind: Kind
    question: Question
    right: str
    wrong: str
    wrong_answer: str


def outdated(dataset: QADataset) -> list[Conflict]:
    """Questions about what a later document of the newswire tells anew; the wrong document is the earlier one.

    Args:
        dataset: newswire with four questions for each document, so that the earlier answer to each is known.
    """
    documents = {document.id: document for document in dataset.documents}
    answers = {question.id: question.answers[0] for question in dataset.questions}
    found = []
    for question in dataset.questions:
        newest = documents[question.document_id]
        if "updates" in newest.metadata:
            earlier = documents[newest.metadata["updates"]]
            wrong = answers[f"{earlier.id}-{_fact(question)}"]
            found.append(Conflict("outdated", question, newest.text, earlier.text, wrong))
    return found


def superseded(dataset: QADataset) -> set[str]:
    """The ids of the documents that a later one updates."""
    return {document.metadata["updates"] for document in dataset.documents if "updates" in document.metadata}


def counterfactual(dataset: QADataset, seed: int) -> list[Conflict]:
    """Questions whose document has its answer replaced, wherever it stands, by that of another question of its kind.

    Left out are questions whose answer does not stand in their document as it is, or still does after it was replaced
    (in other case, say); those that no other answer fits; and documents that update others or are updated.

    Args:
        dataset: any; answers are of a kind in newswire if they are to the same question about other subjects, elsewhere
            if they are alike in words, names, numbers and signs, and of some that are drawn the one of like length.
        seed: draws the wrong answers.
    """
    documents = {document.id: document for document in dataset.documents}
    stories = superseded(dataset) | {name for name, document in documents.items() if "updates" in document.metadata}
    kinds: dict[str, dict[str, None]] = {}
    for question in dataset.questions:
        kinds.setdefault(_kind(dataset, question, documents[question.document_id]), {})[question.answers[0]] = None
    pools = {kind: list(answers) for kind, answers in kinds.items()}
    found = []
    for question in dataset.questions:
        document = documents[question.document_id]
        if document.id in stories:
            continue
        rng = random.Random(f"{seed}/{question.id}")
        pool = pools[_kind(dataset, question, document)]
        words = len(question.answers[0].split())
        drawn = rng.sample(pool, min(_DRAWS, len(pool)))
        for wrong in sorted(drawn, key=lambda answer: abs(len(answer.split()) - words)):
            text = replaced(document.text, question.answers, wrong)
            if text is not None:
                found.append(Conflict("counterfactual", question, document.text, text, wrong))
                break
    return found


def replaced(text: str, answers: tuple[str, ...], wrong: str) -> str | None:
    """A text with another answer in place of all accepted ones; None where that does not make it contradict them."""
    if _holds(text, wrong) or any(_holds(answer, wrong) or _holds(wrong, answer) for answer in answers):
        return None
    longest_first = sorted(answers, key=len, reverse=True)
    pattern = "|".join(re.escape(answer) for answer in longest_first)
    changed = re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda _: wrong, text)
    return changed if _holds(changed, wrong) and not any(_holds(changed, answer) for answer in answers) else None


def shape(answer: str) -> str:
    """What an answer looks like: `A` for names, `a` for other words, `9` for numbers, and its signs.

    Runs of the same count once: "Denver Broncos" and "Santa Clara" are both `A`, "$1.2 million" is `$9 a`.
    """
    signs = re.sub(r"\d[\d,.]*", "9", answer)
    words = re.sub(r"[^\W\d_]+", lambda word: "A" if word[0][0].isupper() else "a", signs)
    return re.sub(r"\b([Aa9])(?: \1)+\b", r"\1", words)


def _holds(text: str, answer: str) -> bool:
    """Whether an answer stands in a text, as answers are compared: without case, signs and articles."""
    return f" {normalize(answer)} " in f" {normalize(text)} "


def _kind(dataset: QADataset, question: Question, document: Document) -> str:
    if dataset.name != "newswire":
        return shape(question.answers[0])
    return f"{document.metadata['title'].rpartition(': ')[2]} {_fact(question)}"


def _fact(question: Question) -> str:
    """Which of its document's facts a newswire question asks about."""
    return question.id.rpartition("-")[2]
