"""Documents that contradict the memory, because they are outdated or false, and answers to questions about them."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from eval.harness.bootstrap import paired_interval
from eval.harness.protocol import judge, summarize
from eval.harness.results import Gain, Row, Verdict
from mac_rag.cli.terminal import say
from mac_rag.data.metrics import exact_match, normalize
from mac_rag.data.types import Answer, Document, QADataset, Question
from mac_rag.engine import MACEngine
from mac_rag.errors import DataError
from mac_rag.model import AmortizedModel

Kind = Literal["outdated", "counterfactual"]

_NAMES = {"outdated": ("outdated document", "newest document"), "counterfactual": ("false document", "true document")}
_DRAWS = 20  # wrong answers to try for one question
_TIME = re.compile(r"^(?:Now|In \d{4}): ")  # in questions of newswire


@dataclass(frozen=True)
class Conflict:
    """A question, a document that answers it, and a document that answers it wrongly.

    Attributes:
        kind: `outdated` (the wrong document was right once) or `counterfactual`.
        question: the question with its right answers.
        right, wrong: texts of the documents with the right and with the wrong answer.
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
    """Questions about facts that a later document of the newswire updates; the earlier document is wrong.

    The newswire has four questions for each document, so that the earlier answer to each is known.
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
    """Ids of the documents that a later document updates."""
    updates = (document.metadata.get("updates") for document in dataset.documents)
    return {name for name in updates if isinstance(name, str)}  # users have other metadata of this name


def counterfactual(dataset: QADataset, seed: int) -> list[Conflict]:
    """Questions whose answer can be replaced in their document by that of another question of the same kind.

    A question is left out if its document does not contain the answer verbatim, if the answer is still there after the
    replacement (in another case, for example), or if no other answer fits. Documents that update others, or that others
    update, are left out too.

    In newswire, answers to the same question about other subjects are of one kind. In other data sets answers of the
    same shape are (see `shape`); of those that the seed draws, the one closest in length is taken.
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
    """The text with a wrong answer in place of all accepted ones; None if the result does not contradict them."""
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


def conflicts(dataset: QADataset, questions: int | None, seed: int) -> list[list[Conflict]]:
    """Conflicts of each kind that the data set has: newswire has both, any other data set only counterfactual ones.

    Args:
        questions: largest number of each kind, drawn by the seed; None for all.

    Returns:
        One list for each kind, none of them empty.
    """
    groups = [outdated(dataset) if dataset.name == "newswire" else [], counterfactual(dataset, seed)]
    if not any(groups):
        raise DataError(
            f"no answer in the {len(dataset.documents)} documents of {dataset.name} can be replaced by another of its "
            "kind; give more --documents"
        )
    rng = random.Random(seed)
    return [
        [group[index] for index in sorted(rng.sample(range(len(group)), min(questions or len(group), len(group))))]
        for group in groups
        if group
    ]


def newest_only(dataset: QADataset) -> set[str]:
    """Ids of the documents that no later document updates."""
    return {document.id for document in dataset.documents} - superseded(dataset)


@dataclass(frozen=True)
class _Condition:
    """One experimental condition.

    Attributes:
        name: name of its row.
        document: the document before the question.
        memory: the documents in the memory; `before` are those known before the update.
        timeless: True to ask without the time that the question names.
        dates: the documents' own; shuffled; or `unused`, with the recency term off.
    """

    name: str
    document: Literal["none", "wrong", "right"]
    memory: Literal["none", "all", "newest", "before"]
    timeless: bool = False
    dates: Literal["own", "shuffled", "unused"] = "own"


def _conditions(kind: str, recency: bool) -> Iterator[_Condition]:
    """Yields all conditions, with the controls of a recency term if `recency`; those without memory come first."""
    wrong, right = _NAMES[kind]
    about = ", updated facts" if kind == "outdated" else ""
    yield _Condition(f"LM alone{about}", "none", "none")
    yield _Condition(f"MAC{about}", "none", "all")
    yield _Condition(wrong, "wrong", "none")
    yield _Condition(f"{wrong} + MAC", "wrong", "all")
    if kind == "outdated":
        yield _Condition(f"{wrong} + MAC of the newest", "wrong", "newest")
    yield _Condition(right, "right", "none")
    yield _Condition(f"{right} + MAC", "right", "all")
    if kind == "outdated":
        yield _Condition("MAC as of before the update", "none", "before")
        yield _Condition("MAC, no time named", "none", "all", timeless=True)
    if not recency:
        return
    controls: list[tuple[Literal["unused", "shuffled"], str]] = [("unused", "recency off")]
    if kind == "outdated":
        controls.append(("shuffled", "dates shuffled"))
    for dates, control in controls:
        yield _Condition(f"MAC{about}, {control}", "none", "all", dates=dates)
        yield _Condition(f"{wrong} + MAC, {control}", "wrong", "all", dates=dates)
        yield _Condition(f"{right} + MAC, {control}", "right", "all", dates=dates)


def measure(
    engine: MACEngine, cases: Sequence[Conflict], dataset: QADataset, *, batch_size: int = 32, seed: int = 0
) -> list[tuple[Row, list[Verdict]]]:
    """Answers the questions of conflicts of one kind under every condition.

    Args:
        engine: an engine that has adapted to the whole stream.
        cases: at least one conflict, all of one kind.

    Returns:
        A row for each condition, with the verdicts on its answers. The gain of a condition with memory is over the same
            prompts without memory.
    """
    newest, shuffled = newest_only(dataset), with_shuffled_dates(dataset.documents, seed)
    kind = cases[0].kind
    model = engine.model
    recency = isinstance(model, AmortizedModel) and model.aggregation.recency is not None
    without_recency = model.without_recency if isinstance(model, AmortizedModel) else nullcontext
    measured: list[tuple[Row, list[Verdict]]] = []
    without: dict[str, dict[str, list[float]]] = {}  # figures of each question, by the document before it
    for condition in _conditions(kind, recency):
        say(condition.name, err=True)
        asked = [_asked(case, condition) for case in cases]
        questions = [case.question for case in asked]
        if condition.dates == "shuffled":
            engine.adapt(shuffled)
        began = time.perf_counter()
        with without_recency() if condition.dates == "unused" else nullcontext():
            answers = _answers(engine, asked, condition, newest, batch_size)
        seconds = time.perf_counter() - began
        if condition.dates == "shuffled":
            engine.adapt(dataset.documents)
        verdicts = judge(questions, answers)
        figures = {
            "em": [verdict.em for verdict in verdicts],
            "f1": [verdict.f1 for verdict in verdicts],
            "wrong": [exact_match(answer.text, case.wrong_answer) for answer, case in zip(answers, asked)],
        }
        measures = {"wrong_share": sum(figures["wrong"]) / len(cases)}
        gain = None
        if condition.memory == "none":
            without[condition.document] = figures
        elif condition.memory != "before":
            before = without[condition.document]
            em, f1, wrong = (paired_interval(figures[name], before[name], seed=seed) for name in ("em", "f1", "wrong"))
            gain = Gain(em=em, f1=f1)
            measures |= {"wrong_gain": wrong.mean, "wrong_gain_low": wrong.low, "wrong_gain_high": wrong.high}
        documents = len(newest) if condition.memory == "newest" else len(engine.bank)
        row = summarize(condition.name, questions, verdicts, documents, None, seconds)
        settings: dict[str, str | int | float] = {
            "conflict": kind,
            "document": condition.document,
            "memory": condition.memory,
            "time_named": int(not condition.timeless),
            "dates": condition.dates,
        }
        measured.append((row.model_copy(update={"gain": gain, "measures": measures, "settings": settings}), verdicts))
    return measured


def _answers(
    engine: MACEngine, cases: Sequence[Conflict], condition: _Condition, newest: Collection[str], batch_size: int
) -> list[Answer]:
    """Answers the questions under a condition; those as of different moments are asked moment by moment."""
    moments = [_moment_before(case) if condition.memory == "before" else None for case in cases]
    answers: dict[int, Answer] = {}
    for moment in dict.fromkeys(moments):
        some = [number for number, other in enumerate(moments) if other == moment]
        found = engine.answer(
            [cases[number].question.question for number in some],
            contexts=[_contexts(cases[number], condition) for number in some],
            use_memory=condition.memory != "none",
            allowed=newest if condition.memory == "newest" else None,
            as_of=moment,
            overflow="truncate",
            batch_size=batch_size,
            progress=len(some) == len(cases),
        )
        answers |= zip(some, found, strict=True)
    return [answers[number] for number in range(len(cases))]


def _moment_before(case: Conflict) -> datetime:
    assert case.changed is not None
    return case.changed - timedelta(microseconds=1)


def _asked(case: Conflict, condition: _Condition) -> Conflict:
    """The case as a condition asks it."""
    if condition.memory == "before":
        return case.before
    return case.timeless if condition.timeless else case


def with_shuffled_dates(documents: Sequence[Document], seed: int) -> list[Document]:
    """The documents with their dates shuffled among them; those without a date stay without."""
    dated = [number for number, document in enumerate(documents) if document.date is not None]
    dates = [documents[number].metadata["date"] for number in dated]
    random.Random(seed).shuffle(dates)
    shuffled = list(documents)
    for number, date in zip(dated, dates, strict=True):
        shuffled[number] = replace(documents[number], metadata={**documents[number].metadata, "date": date})
    return shuffled


def _contexts(case: Conflict, condition: _Condition) -> list[str]:
    return {"none": [], "wrong": [case.wrong], "right": [case.right]}[condition.document]
