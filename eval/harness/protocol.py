"""The paper's protocol: adapt to a stream of documents, then ask about all of them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.harness.bootstrap import paired_interval
from eval.harness.kept_answers import KeptAnswer, KeptAnswers, Prompt
from eval.harness.results import Adaptation, Gain, Row, Sample, Verdict
from mac_rag.data.metrics import best_over, exact_match, f1, prefix_match, recall_at_k
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.engine import Answer, MACEngine
from mac_rag.progress import progress_bar
from mac_rag.retrieval import Hit, Retriever

# Batches that are answered between two writes of kept answers: few enough to lose little.
_GROUP = 4


@dataclass(frozen=True)
class Outcome:
    """What the protocol gives; see `eval.harness.results`."""

    adaptation: Adaptation
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]


def run_protocol(
    engine: MACEngine,
    dataset: QADataset,
    retrievers: Mapping[str, Retriever] | None = None,
    ks: Sequence[int] = (),
    *,
    memory_weights: Sequence[float] = (),
    kept: KeptAnswers | None = None,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = False,
) -> Outcome:
    """Adapts an engine to a stream and asks its questions in every way.

    The rows are the LM alone and MAC (the LM under the memory alone); for each retriever and k also the retriever (its
    documents in front of the question, no memory) and both together. Prompts beyond the LM's window have their
    documents shortened, and are counted.

    Args:
        engine: with an empty bank and no retriever.
        dataset: the stream.
        retrievers: empty ones, by the name that the rows give them.
        ks: numbers of documents to retrieve.
        memory_weights: values of lambda (see `mac_rag.lm.max_rule`), each a row with retriever and memory; none for
            one row of the engine's.
        kept: answers of this model and stream that there are already; takes those that are given now. None for none.
        batch_size: questions of one generation.
        seed: of the bootstrap.
        progress: shows progress bars.

    Raises:
        DocumentError: for a document or question that the model cannot take.
    """
    adaptation = adapt(engine, dataset.documents, progress=progress)
    table = _Table(engine, dataset, kept or KeptAnswers(), batch_size, seed, progress)
    table.ask("LM alone", {"MAC": engine.memory_weight})
    for name, retriever in (retrievers or {}).items():
        retriever.add(dataset.documents)
        engine.retriever = retriever
        for engine.k in ks:
            without = f"{name} top-{engine.k}"
            rows = {f"{without} + MAC, lambda {value:g}": value for value in memory_weights}
            table.ask(without, rows or {f"{without} + MAC": engine.memory_weight})
    engine.retriever = None
    return Outcome(adaptation, tuple(table.rows), samples(dataset.questions, table.verdicts))


@dataclass(frozen=True)
class _Asked:
    """One question as it is asked.

    Attributes:
        prompt: the question and the documents in front of it.
        document_ids: of all that were retrieved.
        truncated: whether less of them is in front.
    """

    prompt: Prompt
    document_ids: tuple[str, ...]
    truncated: bool


class _Table:
    """The rows so far, and what each answered."""

    def __init__(
        self, engine: MACEngine, dataset: QADataset, kept: KeptAnswers, batch_size: int, seed: int, progress: bool
    ) -> None:
        self.engine = engine
        self.dataset = dataset
        self.kept = kept
        self.batch_size = batch_size
        self.seed = seed
        self.progress = progress
        self.rows: list[Row] = []
        self.verdicts: dict[str, list[Verdict]] = {}

    def ask(self, without: str, with_memory: Mapping[str, float | None]) -> None:
        """Adds rows: the same prompts without the memory, and with it at each weight, by the row's name."""
        asked = self._asked()
        configured = self.engine.model.config.memory_weight
        weights = {name: configured if weight is None else weight for name, weight in with_memory.items()}
        if self.progress:
            print(", ".join([without, *weights]), file=sys.stderr)
        self._answer([each.prompt for each in asked], [None, *weights.values()])
        self.rows.append(self._row(without, asked, None))
        for name, weight in weights.items():
            row = self._row(name, asked, weight)
            self.rows.append(row.model_copy(update={"gain": self._gain(name, without)}))

    def _asked(self) -> list[_Asked]:
        """Each question behind what is retrieved for it, as far as that fits; what fits is often the same."""
        questions = [question.question for question in self.dataset.questions]
        retriever = self.engine.retriever
        found: list[list[Hit]] = [[] for _ in questions]
        if retriever is not None:
            found = retriever.retrieve(questions, self.engine.k)
        asked = []
        for question, hits in zip(questions, found, strict=True):
            fitted = self.engine.model.fit_to_window(question, [hit.text for hit in hits], overflow="truncate")
            ids = tuple(hit.document_id for hit in hits)
            asked.append(_Asked((question, fitted.contexts), ids, fitted.truncated))
        return asked

    def _row(self, name: str, asked: Sequence[_Asked], weight: float | None) -> Row:
        """One row: the retrieved documents in front, memory with this lambda, or no memory for None."""
        questions = self.dataset.questions
        given = [answer for each in asked if (answer := self.kept.find(each.prompt, weight))]
        answers = [
            Answer(answer.text, each.prompt[1], each.document_ids, each.truncated)
            for answer, each in zip(given, asked, strict=True)
        ]
        self.verdicts[name] = judge(questions, answers)
        k = None if self.engine.retriever is None else self.engine.k
        seconds = sum(answer.seconds for answer in given)
        return summarize(name, questions, self.verdicts[name], len(self.dataset.documents), k, seconds)

    def _answer(self, prompts: Sequence[Prompt], weights: Sequence[float | None]) -> None:
        """Asks for the answers to prompts that are not there yet, with each weight of memory; keeps them by groups."""
        lacking: dict[tuple[float | None, ...], list[Prompt]] = {}
        for prompt in dict.fromkeys(prompts):
            lacks = tuple(weight for weight in dict.fromkeys(weights) if self.kept.find(prompt, weight) is None)
            # Documents are read once for all weights; without any there is nothing that is read twice.
            for together in [lacks] if prompt[1] else [(weight,) for weight in lacks]:
                lacking.setdefault(together, []).append(prompt)
        lacking.pop((), None)
        with progress_bar("answer", sum(map(len, lacking.values())), disable=not self.progress) as bar:
            for together, new in lacking.items():
                new.sort(key=lambda prompt: len(prompt[0]) + sum(map(len, prompt[1])))  # as batches have to be
                for first in range(0, len(new), _GROUP * self.batch_size):
                    group = new[first : first + _GROUP * self.batch_size]
                    began = time.perf_counter()
                    answers = self._generated(group, together)
                    seconds = (time.perf_counter() - began) / len(group) / len(together)
                    for weight, texts in zip(together, answers, strict=True):
                        kept = [KeptAnswer(text=text, seconds=seconds) for text in texts]
                        self.kept.add(dict(zip(group, kept, strict=True)), weight)
                    bar.advance(len(group))

    def _generated(self, prompts: Sequence[Prompt], weights: Sequence[float | None]) -> list[list[str]]:
        """For each weight the answers to prompts, which are in the order of their lengths."""
        if len(weights) == 1:
            return [self._at(prompts, weights[0])]
        values = [0.0 if weight is None else weight for weight in weights]
        answers: list[list[str]] = [[] for _ in values]
        for first in range(0, len(prompts), self.batch_size):
            questions, contexts = zip(*prompts[first : first + self.batch_size], strict=True)
            phi = self.engine.aggregate(questions)
            fitted = [self.engine.model.fit_to_window(q, c) for q, c in zip(questions, contexts)]
            for given, texts in zip(answers, self.engine.model.generate_each(fitted, phi, values)):
                given += texts
        return answers

    def _at(self, prompts: Sequence[Prompt], weight: float | None) -> list[str]:
        """The answers to prompts with one weight of memory, or without memory."""
        before, self.engine.memory_weight = self.engine.memory_weight, weight
        answers = self.engine.answer(
            [question for question, _ in prompts],
            contexts=[contexts for _, contexts in prompts],
            use_memory=weight is not None,
            batch_size=self.batch_size,
        )
        self.engine.memory_weight = before
        return [answer.text for answer in answers]

    def _gain(self, ours: str, theirs: str) -> Gain:
        intervals = {
            figure: paired_interval(
                [getattr(verdict, figure) for verdict in self.verdicts[ours]],
                [getattr(verdict, figure) for verdict in self.verdicts[theirs]],
                seed=self.seed,
            )
            for figure in ("em", "f1")
        }
        return Gain.model_validate(intervals)


def adapt(engine: MACEngine, documents: Sequence[Document], *, progress: bool = False) -> Adaptation:
    """Adapts an engine to documents and times it; documents beyond the model's limit are chunked and counted."""
    began = time.perf_counter()
    report = engine.adapt(documents, on_long="chunk", progress=progress)
    seconds = time.perf_counter() - began
    chunked = sum(len(entry.phi) > 1 for entry in engine.bank)
    return Adaptation(documents=len(documents), rows=report.rows, chunked=chunked, seconds=seconds)


def judge(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Verdict]:
    """Scores each answer against whichever accepted answer fits best."""
    return [
        Verdict(
            prediction=answer.text,
            em=best_over(exact_match, answer.text, question.answers),
            f1=best_over(f1, answer.text, question.answers),
            em_prefix=best_over(prefix_match, answer.text, question.answers),
            retrieved=answer.document_ids,
            truncated=answer.truncated,
        )
        for question, answer in zip(questions, answers, strict=True)
    ]


def summarize(
    name: str, questions: Sequence[Question], verdicts: Sequence[Verdict], documents: int, k: int | None, seconds: float
) -> Row:
    """One row of the table.

    Args:
        documents: size of the stream.
        k: how many documents were retrieved for each question; None without a retriever.
    """
    recall = None
    if k is not None:
        wanted = [question.document_id for question in questions]
        recall = recall_at_k([verdict.retrieved for verdict in verdicts], wanted, k)
    count = len(questions)
    return Row(
        name=name,
        k=k,
        documents=documents,
        questions=count,
        em=sum(verdict.em for verdict in verdicts) / count,
        f1=sum(verdict.f1 for verdict in verdicts) / count,
        em_prefix=sum(verdict.em_prefix for verdict in verdicts) / count,
        recall_at_k=recall,
        truncated=sum(verdict.truncated for verdict in verdicts),
        seconds=seconds,
    )


def samples(questions: Sequence[Question], verdicts: dict[str, list[Verdict]]) -> tuple[Sample, ...]:
    """Each question with what every row answered to it."""
    return tuple(
        Sample.of(question, {name: given[index] for name, given in verdicts.items()})
        for index, question in enumerate(questions)
    )


def some_questions(dataset: QADataset, count: int | None, seed: int) -> QADataset:
    """The data set with at most `count` of its questions, drawn by the seed and kept in stream order."""
    if count is None or count >= len(dataset.questions):
        return dataset
    drawn = sorted(random.Random(seed).sample(range(len(dataset.questions)), count))
    questions = tuple(dataset.questions[index] for index in drawn)
    return QADataset(dataset.name, dataset.split, dataset.documents, questions)
