"""The paper's protocol: adapt to a stream of documents, then ask all its questions."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from torch import Tensor

from eval.harness.costs import Costs
from eval.harness.kept_answers import KeptAnswer, KeptAnswers, Prompt
from eval.harness.published import cut, scores, with_memory
from eval.harness.results import BY_DATES, Adaptation, Gain, Row, Sample, Verdict
from eval.harness.scales import Protocol
from mac_rag.bank.known_documents import KnownDocuments
from mac_rag.cli.terminal import say
from mac_rag.data.dates import moment_of
from mac_rag.data.metrics import best_over, mrr_at_k, ndcg_at_k, recall_at_k, substring_match
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.engine import Answer, MACEngine
from mac_rag.errors import ConfigError
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import AmortizedModel
from mac_rag.progress import progress_bar
from mac_rag.retrieval import Hit, Retriever

_GROUP = 4  # batches between two writes of kept answers: few enough to lose little
_TIMES_UNUSED = ", times unused"  # after the name of a row


@dataclass(frozen=True)
class Outcome:
    """Everything that the protocol measures; see `eval.harness.results`."""

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
    protocol: Protocol = "strict",
) -> Outcome:
    """Adapts an engine to a stream and asks its questions with and without memory and retrieved documents.

    The rows are the LM alone and MAC (the LM with memory alone). For each retriever and k follow the retriever (its
    documents before the question, no memory) and both together. Documents that do not fit into the LM's window are
    shortened, and the row counts such prompts. Each row has its costs (`eval.harness.costs`).

    If questions have a moment, each row but the LM alone comes twice: with all documents, and `dated`, as of the moment
    of each question. `dates_f1` of the second is its gain in F1 over the first. If the model itself uses times, a row
    of its memory that does not comes first, and `dates_f1` of the other rows of memory alone is the gain over that.

    Args:
        engine: an engine with an empty bank and no retriever.
        retrievers: empty retrievers by the name that their rows get.
        ks: numbers of documents to retrieve.
        memory_weights: values of lambda (see `mac_rag.lm.decoding`), each for a row with retriever and memory. Empty
            for one such row with the engine's memory weight.
        kept: answers of this model and stream so far; new answers are added. None: answers are kept for this call only.
        seed: random seed of the bootstrap.
        protocol: how documents are cut, answers decoded and scored (`eval.harness.published`).

    Raises:
        ConfigError: for the published protocol and a model whose memory is not amortized.
        DocumentError: for a document or question that the model cannot take.
    """
    documents: Sequence[Document] = dataset.documents
    if protocol == "published":
        if not isinstance(engine.model, AmortizedModel):
            raise ConfigError("the published protocol is of amortized memories; take --protocol strict for this model")
        documents = cut(engine.model, documents)
    adaptation = adapt(engine, documents)
    table = _Table(engine, dataset, kept or KeptAnswers(), batch_size, seed, protocol)
    dated = any(question.as_of is not None for question in dataset.questions)
    if dated and engine.model.knows_times:
        table.ask("LM alone", {"MAC": engine.memory_weight}, times_used=False)
    table.ask("LM alone", {"MAC": engine.memory_weight})
    if dated:
        table.ask("LM alone", {"MAC": engine.memory_weight}, dated=True)
    for name, retriever in (retrievers or {}).items():
        retriever.add(dataset.documents)
        for k in ks:
            without = f"{name} top-{k}"
            with_memory: dict[str, float | None] = {
                f"{without} + MAC, lambda {value:g}": value for value in memory_weights
            }
            with_memory = with_memory or {f"{without} + MAC": engine.memory_weight}
            table.ask(without, with_memory, retriever, k)
            if dated:
                table.ask(without, with_memory, retriever, k, dated=True)
    return Outcome(adaptation, tuple(table.rows), samples(dataset.questions, table.verdicts))


@dataclass(frozen=True)
class _Query:
    """A question with its documents as they fit into the LM's window (`prompt`), and the ids of all retrieved ones."""

    prompt: Prompt
    document_ids: tuple[str, ...]
    truncated: bool


class _Table:
    """The rows so far, and the verdicts on the answers of each."""

    def __init__(
        self,
        engine: MACEngine,
        dataset: QADataset,
        kept: KeptAnswers,
        batch_size: int,
        seed: int,
        protocol: Protocol = "strict",
    ) -> None:
        self.engine = engine
        self.dataset = dataset
        self.kept = kept
        self.batch_size = batch_size
        self.seed = seed
        self.protocol = protocol
        self.rows: list[Row] = []
        self.verdicts: dict[str, list[Verdict]] = {}
        self._fitted: dict[Prompt, FittedPrompt] = {}
        self._with_memory: dict[Prompt, FittedPrompt] = {}  # documents that the model reads from its bank not in them
        self._costs = Costs(engine, [question.question for question in dataset.questions])

    def ask(
        self,
        without: str,
        with_memory: Mapping[str, float | None],
        retriever: Retriever | None = None,
        k: int | None = None,
        *,
        dated: bool = False,
        times_used: bool = True,
    ) -> None:
        """Adds the row without memory, and a row with memory for each weight, all of the same prompts.

        Dated rows have names of their own, and come after the undated rows of the same names. Without a retriever,
        dates change nothing for the row without memory, which is not repeated.

        Args:
            without: name of the row without memory.
            with_memory: name of each row with memory, and its memory weight; None for the model's own.
            retriever: finds k documents for each question; None for questions alone.
            dated: True to ask as of the moment of each question.
            times_used: False for a row of a memory that ignores times.
        """
        queries = self._queries(retriever, k, dated, times_used)
        configured = self.engine.model.config.memory_weight
        weights = {name: configured if weight is None else weight for name, weight in with_memory.items()}
        suffix = (", dated" if dated else "") + ("" if times_used else _TIMES_UNUSED)
        baseline = without if retriever is None else f"{without}{suffix}"
        say(", ".join([baseline, *(f"{name}{suffix}" for name in weights)]), err=True)
        with nullcontext() if times_used else self.engine.model.without_times():
            self._answer([query.prompt for query in queries], [None, *weights.values()])
        if baseline not in self.verdicts:
            self._add(self._row(baseline, queries, k, None), undated=without if dated else None)
        for name, weight in weights.items():
            row = self._row(f"{name}{suffix}", queries, k, weight)
            row = row.model_copy(update={"gain": self._gain(row.name, baseline)})
            without_times = f"{name}{_TIMES_UNUSED}"
            if retriever is None and times_used and without_times in self.verdicts:
                self._add(row, undated=without_times)
            else:
                self._add(row, undated=name if dated else None)

    def _add(self, row: Row, undated: str | None) -> None:
        """Adds a row; `undated` names the row that uses no dates, over which the gain by dates is measured."""
        if undated is not None:
            gain = self._gain(row.name, undated).f1
            dates = dict(zip(BY_DATES, (gain.mean, gain.low, gain.high), strict=True))
            row = row.model_copy(update={"measures": row.measures | dates})
        self.rows.append(row)

    def _queries(self, retriever: Retriever | None, k: int | None, dated: bool, times_used: bool) -> list[_Query]:
        """Fits each question with its retrieved documents into the window; equal prompts are common."""
        questions = [question.question for question in self.dataset.questions]
        moments = [question.as_of if dated else None for question in self.dataset.questions]
        hits: list[list[Hit]] = [[] for _ in questions]
        if retriever is not None and k is not None:
            for moment, places in _by_moment(moments).items():
                found = retriever.retrieve([questions[place] for place in places], k, allowed=self._known(moment))
                for place, row in zip(places, found, strict=True):
                    hits[place] = row
        queries = []
        for question, moment, row in zip(questions, moments, hits, strict=True):
            fitted = self.engine.model.fit_to_window(question, [hit.text for hit in row], overflow="truncate")
            prompt = Prompt(question, fitted.contexts, moment, times_used)
            self._fitted[prompt] = fitted
            write = partial(self.engine.model.fit_to_window, question, overflow="truncate")
            self._with_memory[prompt] = self.engine.fit(row, write, as_of=moment)
            queries.append(_Query(prompt, tuple(hit.document_id for hit in row), fitted.truncated))
        return queries

    def _known(self, moment: str | None) -> KnownDocuments | None:
        """The documents of the stream that count at a moment; None for all."""
        return None if moment is None else KnownDocuments(self.engine.snapshot, moment_of(moment))

    def _row(self, name: str, queries: Sequence[_Query], k: int | None, weight: float | None) -> Row:
        """The row of answered queries with a memory weight, or without memory for None."""
        questions = self.dataset.questions
        generated = [answer for query in queries if (answer := self.kept.find(query.prompt, weight))]
        answers = [
            Answer(answer.text, query.prompt.contexts, query.document_ids, query.truncated)
            for answer, query in zip(generated, queries, strict=True)
        ]
        self.verdicts[name] = judge(questions, answers, self.protocol)
        seconds = sum(answer.seconds for answer in generated)
        row = summarize(name, questions, self.verdicts[name], len(self.dataset.documents), k, seconds)
        costs = self._costs.measures([self._read(query.prompt, weight) for query in queries], weight)
        return row.model_copy(update={"measures": costs})

    def _answer(self, prompts: Sequence[Prompt], weights: Sequence[float | None]) -> None:
        """Generates the answers that are not kept yet, for each prompt with each memory weight, and keeps them."""
        missing = {
            weight: [prompt for prompt in dict.fromkeys(prompts) if self.kept.find(prompt, weight) is None]
            for weight in dict.fromkeys(weights)
        }
        with progress_bar("answer", sum(map(len, missing.values()))) as bar:
            for weight, pending in missing.items():
                # Batches of similar length.
                pending.sort(key=lambda prompt: len(prompt.question) + sum(map(len, prompt.contexts)))
                for first in range(0, len(pending), _GROUP * self.batch_size):
                    group = pending[first : first + _GROUP * self.batch_size]
                    began = time.perf_counter()
                    texts = self._generate(group, weight)
                    seconds = (time.perf_counter() - began) / len(group)
                    new = [KeptAnswer(text=text, seconds=seconds) for text in texts]
                    self.kept.add(dict(zip(group, new, strict=True)), weight)
                    bar.advance(len(group))

    def _generate(self, prompts: Sequence[Prompt], weight: float | None) -> list[str]:
        """Generates the answers to the prompts with one memory weight, or without memory for None."""
        answer = self._searched if self.protocol == "published" else self._answered
        texts = [""] * len(prompts)
        for moment, places in _by_moment([prompt.as_of if weight is not None else None for prompt in prompts]).items():
            answers = answer([self._read(prompts[place], weight) for place in places], weight, moment)
            for place, text in zip(places, answers, strict=True):
                texts[place] = text
        return texts

    def _answered(self, prompts: Sequence[FittedPrompt], weight: float | None, moment: str | None) -> list[str]:
        """Answers by the engine."""
        answers = self.engine.answer(
            prompts,
            use_memory=weight is not None,
            memory_weight=weight,
            batch_size=self.batch_size,
            as_of=moment,
        )
        return [answer.text for answer in answers]

    def _searched(self, prompts: Sequence[FittedPrompt], weight: float | None, moment: str | None) -> list[str]:
        """Answers by the published decoding, with memory, or without for None."""
        texts: list[str] = []
        model = cast(AmortizedModel, self.engine.model)
        for first in range(0, len(prompts), self.batch_size):
            some = prompts[first : first + self.batch_size]
            asked = [prompt.question for prompt in some]
            phi = None if weight is None else cast(Tensor, self.engine.aggregate(asked, as_of=moment))
            texts += with_memory(model, some, phi)
        return texts

    def _read(self, prompt: Prompt, weight: float | None) -> FittedPrompt:
        """What the LM reads with a memory weight, or without memory for None."""
        return self._fitted[prompt] if weight is None else self._with_memory[prompt]

    def _gain(self, row: str, baseline: str) -> Gain:
        return Gain.over(self.verdicts[row], self.verdicts[baseline], seed=self.seed)


def _by_moment(moments: Sequence[str | None]) -> dict[str | None, list[int]]:
    """Groups indices by moment."""
    places: dict[str | None, list[int]] = {}
    for place, moment in enumerate(moments):
        places.setdefault(moment, []).append(place)
    return places


def adapt(engine: MACEngine, documents: Sequence[Document]) -> Adaptation:
    """Adapts an engine to documents, in chunks if one exceeds the model's limit, and times it.

    Raises:
        DocumentError: for an empty document.
    """
    began = time.perf_counter()
    report = engine.adapt(documents, on_long="chunk", progress=True)
    seconds = time.perf_counter() - began
    chunked = sum(entry.rows > 1 for entry in engine.bank)
    return Adaptation(documents=len(documents), rows=report.rows, chunked=chunked, seconds=seconds)


def judge(questions: Sequence[Question], answers: Sequence[Answer], protocol: Protocol = "strict") -> list[Verdict]:
    """Scores each answer by a protocol; ours takes the accepted answer that fits it best."""
    return [
        Verdict(
            prediction=answer.text,
            **scores(protocol, answer.text, question),
            retrieved=answer.document_ids,
            truncated=answer.truncated,
        )
        for question, answer in zip(questions, answers, strict=True)
    ]


def summarize(
    name: str, questions: Sequence[Question], verdicts: Sequence[Verdict], documents: int, k: int | None, seconds: float
) -> Row:
    """The row of a table: the means of the verdicts on at least one question.

    Args:
        documents: number of documents in the stream.
        k: number of documents retrieved for each question; None without a retriever. The figures of retrieval are those
            of the questions which name their document.
        seconds: time of answering all questions.
    """
    known = [(verdict.retrieved, q.document_id) for q, verdict in zip(questions, verdicts) if q.document_id is not None]
    retrieval: dict[str, float] = {}
    if k is not None and known:
        found, gold = [ids for ids, _ in known], [document_id for _, document_id in known]
        metrics = {"recall_at_k": recall_at_k, "mrr_at_k": mrr_at_k, "ndcg_at_k": ndcg_at_k}
        retrieval = {name: metric(found, gold, k) for name, metric in metrics.items()}
    substring = [best_over(substring_match, verdict.prediction, q.answers) for q, verdict in zip(questions, verdicts)]
    count = len(questions)
    return Row(
        name=name,
        k=k,
        documents=documents,
        questions=count,
        em=sum(verdict.em for verdict in verdicts) / count,
        f1=sum(verdict.f1 for verdict in verdicts) / count,
        em_prefix=sum(verdict.em_prefix for verdict in verdicts) / count,
        substring=sum(substring) / count,
        **retrieval,
        truncated=sum(verdict.truncated for verdict in verdicts),
        seconds=seconds,
    )


def samples(questions: Sequence[Question], verdicts: dict[str, list[Verdict]]) -> tuple[Sample, ...]:
    """A sample of each question, with the verdicts of all rows by their names."""
    return tuple(
        Sample.of(question, {name: column[index] for name, column in verdicts.items()})
        for index, question in enumerate(questions)
    )


def some_questions(dataset: QADataset, count: int | None, seed: int) -> QADataset:
    """The data set with at most `count` of its questions, drawn by the seed, in the order of the stream."""
    if count is None or count >= len(dataset.questions):
        return dataset
    drawn = sorted(random.Random(seed).sample(range(len(dataset.questions)), count))
    questions = tuple(dataset.questions[index] for index in drawn)
    return replace(dataset, questions=questions)
