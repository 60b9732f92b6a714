"""Documents that contradict the memory: outdated ones, and ones whose answer is replaced by a wrong one."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from mac_rag.data.metrics import normalize
from mac_rag.data.types import Document, QADataset, Question

Kind = Literal["outdated", "counterfactual"]

_DRAWS = 20  # wrong answers to try for one question
_TIME = re.compile(r"^(?:Now|In \d{4}): ")  # in questions of newswire


@dataclass(frozen=True)
class Conflict:
    """A question, a document that answers it, and a document that answers it wrongly.

    Attributes:
        kind: `outdated` (the wrong document was right once) or `counterfactual`.
        question: the question with its right answers.
        right: text of the document with the right answer.
        wrong: text of the document with the wrong answer.
        wrong_answer: the answer that the wrong document gives.
        changed: when the right document superseded the wrong one; None for counterfactual ones.
    """

    kind: Kind
    question: Question
    right: str
    wrong: str
    wrong_answer: str
    changed: datetime | None = None

    @property
    def before(self) -> Conflict:
        """The same question before the change: the older document is right then."""
        question = replace(self.question, answers=(self.wrong_answer,))
        return replace(self, question=question, wrong_answer=self.question.answers[0])

    @property
    def timeless(self) -> Conflict:
        """The same question without its time: it then asks for what is right now."""
        text = _TIME.sub("", self.question.question)
        return replace(self, question=replace(self.question, question=text))


def outdated(dataset: QADataset) -> list[Conflict]:
    """Questions about facts that a later document of the newswire updates; the wrong document is the earlier one.

    Args:
        dataset: newswire with four questions for each document, so that the earlier answer to each question is known.
    """
    documents = {document.id: document for document in dataset.documents}
    answers = {question.id: question.answers[0] for question in dataset.questions}
    conflicts = []
    for question in dataset.questions:
        newest = documents[question.gold]
        if "updates" in newest.metadata:
            earlier = documents[newest.metadata["updates"]]
            wrong = answers[f"{earlier.id}-{_fact(question)}"]
            conflicts.append(Conflict("outdated", question, newest.text, earlier.text, wrong, newest.date))
    return conflicts


def superseded(dataset: QADataset) -> set[str]:
    """The ids of the documents that a later document updates."""
    updates = (document.metadata.get("updates") for document in dataset.documents)
    return {name for name in updates if isinstance(name, str)}  # users have other metadata of this name


def counterfactual(dataset: QADataset, seed: int) -> list[Conflict]:
    """Questions with a copy of their document in which the answer of another question of the same kind replaces theirs.

    A question is left out if its document does not contain the answer verbatim, if the answer is still there after the
    replacement (in another case, for example), or if no other answer fits. Documents that update others, or that others
    update, are left out too.

    Args:
        dataset: any data set. In newswire, answers to the same question about other subjects are of one kind.
            Elsewhere answers of the same shape are (see `shape`); the drawn answer closest in length is taken.
        seed: random seed of the wrong answers.
    """
    documents = {document.id: document for document in dataset.documents}
    stories = superseded(dataset) | {name for name, document in documents.items() if "updates" in document.metadata}
    kinds: dict[str, dict[str, None]] = {}
    for question in dataset.questions:
        kinds.setdefault(_kind(dataset, question, documents[question.gold]), {})[question.answers[0]] = None
    pools = {kind: list(answers) for kind, answers in kinds.items()}
    conflicts = []
    for question in dataset.questions:
        document = documents[question.gold]
        if document.id in stories:
            continue
        rng = random.Random(f"{seed}/{question.id}")
        pool = pools[_kind(dataset, question, document)]
        words = len(question.answers[0].split())
        drawn = rng.sample(pool, min(_DRAWS, len(pool)))
        for wrong in sorted(drawn, key=lambda answer: abs(len(answer.split()) - words)):
            text = replaced(document.text, question.answers, wrong)
            if text is not None:
                conflicts.append(Conflict("counterfactual", question, document.text, text, wrong))
                break
    return conflicts


def replaced(text: str, answers: tuple[str, ...], wrong: str) -> str | None:
    """A text with a wrong answer in place of all accepted ones; None if the result does not contradict them."""
    if _holds(text, wrong) or any(_holds(answer, wrong) or _holds(wrong, answer) for answer in answers):
        return None
    longest_first = sorted(answers, key=len, reverse=True)
    pattern = "|".join(re.escape(answer) for answer in longest_first)
    changed = re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda _: wrong, text)
    return changed if _holds(changed, wrong) and not any(_holds(changed, answer) for answer in answers) else None


def shape(answer: str) -> str:
    """The shape of an answer: `A` for a name, `a` for another word, `9` for a number, and its signs.

    A run of equal parts counts once: "Denver Broncos" and "Santa Clara" are both `A`, "$1.2 million" is `$9 a`.
    """
    signs = re.sub(r"\d[\d,.]*", "9", answer)
    words = re.sub(r"[^\W\d_]+", lambda word: "A" if word[0][0].isupper() else "a", signs)
    return re.sub(r"\b([Aa9])(?: \1)+\b", r"\1", words)


def _holds(text: str, answer: str) -> bool:
    """True if a text contains an answer, both normalised as for exact match: without case, signs and articles."""
    return f" {normalize(answer)} " in f" {normalize(text)} "


def _kind(dataset: QADataset, question: Question, document: Document) -> str:
    if dataset.name != "newswire":
        return shape(question.answers[0])
    return f"{document.metadata['title'].rpartition(': ')[2]} {_fact(question)}"


def _fact(question: Question) -> str:
    """The number of the fact in its document that a newswire question asks about."""
    return question.id.rpartition("-")[2]
