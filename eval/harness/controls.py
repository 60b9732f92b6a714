"""Controls of a memory: the same questions, answered from what could take the memory's place."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from eval.harness.bootstrap import paired_interval
from eval.harness.kept_answers import KeptAnswer, KeptAnswers, Prompt
from eval.harness.protocol import judge, summarize
from eval.harness.results import Gain, Row, Verdict
from mac_rag.bank.bank import Contents
from mac_rag.cli.terminal import say
from mac_rag.config import AttentionConfig
from mac_rag.data.types import Answer, QADataset
from mac_rag.engine import MACEngine
from mac_rag.lm.batching import pad_rows
from mac_rag.lm.decoding import ExtractiveDecoding, MaxRuleEnsemble, numeral_tokens
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import BATCH_TOKENS, AmortizedModel, OwnKVModel, ReadRow, ReadRows
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.progress import progress_bar
from mac_rag.retrieval import BM25Retriever

MEMORY = "memory"
SIDE_BY_SIDE = 3  # rows whose memory tokens stand side by side
_PRESELECTED = 8  # rows with the highest prior, one of which has most attention
_QUESTIONS = 32  # that are scored at a time

Documents = tuple[str, ...]  # ids


@dataclass(frozen=True)
class Control:
    """One way to answer.

    Attributes:
        answer: maps the numbers of some questions to their answers.
        documents: ids of the documents that each question is answered from; empty for the whole bank.
        k: number of these documents; None for the whole bank.
    """

    name: str
    answer: Callable[[Sequence[int]], list[str]]
    documents: Sequence[Documents]
    k: int | None = None


class Controls(ABC):
    """The controls of one stream and one engine, which has adapted to it and has no retriever.

    Attributes:
        not_run: controls that this model or stream cannot have, each with the reason; complete after `all`.
    """

    def __init__(self, engine: MACEngine, dataset: QADataset, *, batch_size: int = 32) -> None:
        self.engine = engine
        self.dataset = dataset
        self.batch_size = batch_size
        self.not_run: dict[str, str] = {}
        self._questions = [question.question for question in dataset.questions]
        self._texts = {document.id: document.text for document in dataset.documents}

    @abstractmethod
    def all(self) -> Iterator[Control]:
        """All controls; the memory itself comes first."""

    @abstractmethod
    def attended(self, numbers: Sequence[int]) -> list[str]:
        """Maps numbers of questions to the ids of the documents with most of their attention, empty for none."""

    def _right(self, *names: str) -> list[str] | None:
        """The right document of each question; None if the stream does not hold one, and then `names` are not run."""
        gold = [question.document_id for question in self.dataset.questions]
        known = [document_id for document_id in gold if document_id in self._texts]
        if len(known) == len(gold):
            return known
        reason = f"{len(gold) - len(known)} of {len(gold)} questions name no document of the stream"
        self.not_run |= dict.fromkeys(names, reason)
        return None

    def _retrieved(self) -> list[Documents]:
        """BM25's first document for each question; none for a question that shares no word with any."""
        retriever = BM25Retriever()
        retriever.add(self.dataset.documents)
        return [tuple(hit.document_id for hit in hits) for hits in retriever.retrieve(self._questions, 1)]

    def _text(
        self, name: str, documents: Sequence[Documents], *, k: int | None = 1, use_memory: bool = False
    ) -> Control:
        """The LM reads texts of documents, with or without the memory."""

        def answer(numbers: Sequence[int]) -> list[str]:
            prompts = [self._fitted(number, documents[number]) for number in numbers]
            return self._asked(prompts, use_memory=use_memory)

        return Control(name, answer, documents, k)

    def _from_memory(self, numbers: Sequence[int]) -> list[str]:
        return self._asked([self._fitted(number) for number in numbers], use_memory=True)

    def _asked(self, prompts: Sequence[FittedPrompt], *, use_memory: bool) -> list[str]:
        answers = self.engine.answer(prompts, use_memory=use_memory, batch_size=self.batch_size)
        return [answer.text for answer in answers]

    def _fitted(self, number: int, document_ids: Sequence[str] = ()) -> FittedPrompt:
        """The prompt of a question after documents, truncated to fit."""
        texts = [self._texts[document_id] for document_id in document_ids]
        return self.engine.model.fit_to_window(self._questions[number], texts, overflow="truncate")


class OwnKVControls(Controls):
    """The controls of a memory of the LM's own keys and values."""

    def __init__(self, engine: MACEngine, dataset: QADataset, *, batch_size: int = 32) -> None:
        super().__init__(engine, dataset, batch_size=batch_size)
        assert isinstance(engine.model, OwnKVModel)
        assert isinstance(engine.bank, Contents)
        self.model, self._bank = engine.model, engine.bank

    def all(self) -> Iterator[Control]:
        everything: list[Documents] = [()] * len(self._questions)
        yield Control(MEMORY, self._from_memory, everything)
        read = self._read
        first = [documents[:1] for documents in read]
        yield self._rows("memory, scores off", read, None)
        yield self._rows("first document's row", first, 1)
        names = "right document's row", "right document's text"
        if (right := self._right(*names)) is not None:
            known: list[Documents] = [(document_id,) for document_id in right]
            yield self._rows(names[0], known, 1)
            yield self._text(names[1], known)
        yield self._text("texts of the documents in memory", read, k=None)
        yield self._text("first document's text", first)
        yield self._text("BM25's first text", self._retrieved())

    def attended(self, numbers: Sequence[int]) -> list[str]:
        return [(*self._read[number], "")[0] for number in numbers]

    @cached_property
    def _read(self) -> list[Documents]:
        """The documents that the memory reads for each question, the one with most attention first."""
        found: list[Documents] = []
        with progress_bar("rank", len(self._questions)) as bar:
            for start in range(0, len(self._questions), _QUESTIONS):
                batch = self._questions[start : start + _QUESTIONS]
                ids, mass = self.engine.document_attention(batch)
                for shares in mass:
                    places = shares.argsort(descending=True, stable=True).tolist()
                    found.append(tuple(ids[place] for place in places if shares[place] > 0))
                bar.advance(len(batch))
        return found

    def _rows(self, name: str, documents: Sequence[Documents], k: int | None) -> Control:
        """The LM reads rows of documents, all alike."""

        def answer(numbers: Sequence[int]) -> list[str]:
            phi = ReadRows([self._decoded(documents[number]) for number in numbers])
            return [*self.model.generate([self._fitted(number) for number in numbers], modulation=phi)]

        return Control(name, answer, documents, k)

    def _decoded(self, document_ids: Documents) -> list[ReadRow]:
        keys = [key for keys in self._bank.rows_of(document_ids).values() for key in keys]
        return [ReadRow(row, 0.0) for row in self.model.decode_all(self._bank.codes(keys))]


class AmortizedControls(Controls):
    """The controls of a memory of amortized contexts."""

    def __init__(self, engine: MACEngine, dataset: QADataset, *, batch_size: int = 32) -> None:
        super().__init__(engine, dataset, batch_size=batch_size)
        assert isinstance(engine.model, AmortizedModel)
        self.model = engine.model
        self._ranked = RankedRows(engine, self._questions)

    def all(self) -> Iterator[Control]:
        everything: list[Documents] = [()] * len(self._questions)
        yield Control(MEMORY, self._from_memory, everything)
        first = self._ranked.best(1)
        yield self._tokens("first row's tokens", first, 1)
        name = f"first {SIDE_BY_SIDE} rows' tokens side by side"
        reason = self._against_side_by_side()
        if reason is None:
            yield self._tokens(name, self._ranked.best(SIDE_BY_SIDE), SIDE_BY_SIDE)
        else:
            self.not_run[name] = reason
        yield from self._of_right_documents()
        first_documents = self._owners(first)
        yield self._text("first document's text", first_documents)
        found = self._retrieved()
        yield self._text("BM25's first text", found)
        yield self._text("BM25's first text + memory", found, use_memory=True)
        both = [(*mine, *theirs) for mine, theirs in zip(found, first_documents, strict=True)]
        yield Control("both texts, max rule", self._from_two_texts(both), both, 2)
        # The slowest comes last: without the prior no row of the bank can be skipped.
        if self.model.aggregation.prior is not None:
            yield Control("memory, prior off", self._without_prior, everything)
        else:
            self.not_run["memory, prior off"] = "the model has no document prior"

    def _of_right_documents(self) -> Iterator[Control]:
        """Oracles: controls that know the document of each question."""
        names = "right document's tokens", "right document's text"
        if (right := self._right(*names)) is not None:
            yield self._tokens(names[0], self._ranked.best_of(right), 1)
            yield self._text(names[1], [(document_id,) for document_id in right])

    def attended(self, numbers: Sequence[int]) -> list[str]:
        ids, mass = self._attending.document_attention([self._questions[number] for number in numbers])
        return [ids[place] for place in mass.argmax(1).tolist()]

    @cached_property
    def _attending(self) -> MACEngine:
        """An engine that tells attention without reading all rows, if the prior says which ones can have most."""
        if self.model.aggregation.prior is None:
            return self.engine
        preselected = AttentionConfig(strategy="preselect", preselected=_PRESELECTED)
        return MACEngine(self.model, self.engine.bank, attention=preselected)

    def _against_side_by_side(self) -> str | None:
        """The reason why the LM cannot read several rows of memory tokens side by side; None if it can."""
        model = self.model
        if model.config.modulation.kind not in ("prefix", "prompt") or model.config.modulation.attention_sink:
            return "only a prefix without an attention sink, and a prompt, may have more than T tokens"
        positions = SIDE_BY_SIDE * model.modulation.prefix_length + model.config.max_new_tokens
        longest = max(len(model.fit_to_window(question).ids) for question in self._questions)
        if positions + longest > model.base_lm.context_window:
            return f"they take {positions + longest} positions, and the LM has {model.base_lm.context_window}"
        return None

    def _owners(self, rows: Sequence[Sequence[int]]) -> list[Documents]:
        """The documents of rows, each once, in the order of the rows."""
        return [tuple(dict.fromkeys(self._ranked.owners[row] for row in some)) for some in rows]

    def _tokens(self, name: str, rows: Sequence[Sequence[int]], k: int) -> Control:
        """The LM reads memory tokens of some rows in place of phi*, without any aggregation."""

        def answer(numbers: Sequence[int]) -> list[str]:
            phi = torch.stack([self._ranked.tokens(rows[number]) for number in numbers])
            prompts = [self._fitted(number) for number in numbers]
            return list(self.model.generate(prompts, modulation=phi))

        return Control(name, answer, self._owners(rows), k)

    def _without_prior(self, numbers: Sequence[int]) -> list[str]:
        with self.model.without_document_prior():
            return self._from_memory(numbers)

    def _from_two_texts(self, documents: Sequence[Documents]) -> Callable[[Sequence[int]], list[str]]:
        """The max rule over the first and the last of some documents, without memory."""

        def answer(numbers: Sequence[int]) -> list[str]:
            first, second = (
                [self._fitted(number, documents[number][place]) for number in numbers]
                for place in (slice(0, 1), slice(-1, None))
            )
            return answers_from_two_texts(self.model, first, second)

        return answer


def controls_of(engine: MACEngine, dataset: QADataset, *, batch_size: int = 32) -> Controls:
    """The controls of an engine's kind of memory."""
    kind = AmortizedControls if isinstance(engine.model, AmortizedModel) else OwnKVControls
    return kind(engine, dataset, batch_size=batch_size)


def ask_controls(
    controls: Controls, path: Path | None, source: str, *, seed: int = 0
) -> tuple[list[Row], dict[str, list[Verdict]]]:
    """Asks all questions of each control.

    Args:
        path: a file that keeps answers, so that an interrupted run continues; None keeps none.
        source: digest of the model and the stream, from `answer_source`.
        seed: random seed of the bootstrap.

    Returns:
        A row for each control, whose gain is over the memory's row; and the verdicts on its answers.
    """
    questions = controls.dataset.questions
    rows: list[Row] = []
    verdicts: dict[str, list[Verdict]] = {}
    for control in controls.all():
        kept = KeptAnswers(path, f"{source} {control.name}")
        answers, seconds = _answers(controls, control, kept)
        shown = [Answer(text, (), documents, False) for text, documents in zip(answers, control.documents, strict=True)]
        verdicts[control.name] = judge(questions, shown)
        row = summarize(
            control.name, questions, verdicts[control.name], len(controls.dataset.documents), control.k, seconds
        )
        if rows:
            row = row.model_copy(update={"gain": Gain.over(verdicts[control.name], verdicts[MEMORY], seed=seed)})
        else:
            attended = _attended(controls, KeptAnswers(path, f"{source} attention"))
            row = row.model_copy(update={"measures": _errors(controls, verdicts[MEMORY], attended)})
        rows.append(row)
    return rows, verdicts


def _answers(controls: Controls, control: Control, kept: KeptAnswers) -> tuple[list[str], float]:
    """The answer to each question, kept or new, and the time that all answers took."""
    # Equal questions differ if they are asked about different documents.
    prompts = [
        Prompt(question.question, documents)
        for question, documents in zip(controls.dataset.questions, control.documents, strict=True)
    ]
    pending: dict[Prompt, int] = {}
    for number, prompt in enumerate(prompts):
        if kept.find(prompt, None) is None:
            pending.setdefault(prompt, number)
    numbers = sorted(pending.values(), key=lambda number: len(prompts[number].question))
    say(control.name, err=True)
    with progress_bar("answer", len(numbers)) as bar:
        for first in range(0, len(numbers), controls.batch_size):
            batch = numbers[first : first + controls.batch_size]
            began = time.perf_counter()
            texts = control.answer(batch)
            seconds = (time.perf_counter() - began) / len(batch)
            new = [KeptAnswer(text=text, seconds=seconds) for text in texts]
            kept.add({prompts[number]: answer for number, answer in zip(batch, new, strict=True)}, None)
            bar.advance(len(batch))
    found = [answer for prompt in prompts if (answer := kept.find(prompt, None))]
    return [answer.text for answer in found], sum(answer.seconds for answer in found)


def _attended(controls: Controls, kept: KeptAnswers) -> list[str]:
    """Id of the document with most of each question's attention; empty if no document has any."""
    nothing: list[Documents] = [()] * len(controls.dataset.questions)
    return _answers(controls, Control("attention", controls.attended, nothing), kept)[0]


def _errors(controls: Controls, verdicts: Sequence[Verdict], attended: Sequence[str]) -> dict[str, float]:
    """The memory's errors of each kind as shares of the questions that name their document, with 95 % intervals."""
    known = [
        (verdict.em == 0, document_id == question.document_id)
        for question, verdict, document_id in zip(controls.dataset.questions, verdicts, attended, strict=True)
        if question.document_id is not None
    ]
    measures: dict[str, float] = {}
    if known:
        shares = {
            "attended_right": [float(right) for _, right in known],
            "wrong_document": [float(wrong and not right) for wrong, right in known],
            "read_wrong": [float(wrong and right) for wrong, right in known],
        }
        for name, values in shares.items():
            interval = paired_interval(values, [0.0] * len(values))
            measures |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return measures


class RankedRows:
    """The rows of a bank that has merged no documents, ranked for B questions by the document prior, or by attention.

    Attributes:
        owners: id of the document of each of K rows.
        scores: `[B, K]`.
    """

    def __init__(self, engine: MACEngine, questions: Sequence[str]) -> None:
        assert isinstance(engine.model, AmortizedModel)
        self._engine = engine
        self._model = model = engine.model
        self._rows = [(entry.members[0].document_id, row) for entry in engine.bank for row in range(entry.rows)]
        self.owners = [document_id for document_id, _ in self._rows]
        phi = engine.bank.phi.to(model.device, torch.float32)
        parts = []
        with progress_bar("rank", len(questions)) as bar:
            for first in range(0, len(questions), _QUESTIONS):
                batch = questions[first : first + _QUESTIONS]
                parts.append(_scores(model, batch, phi).cpu())
                bar.advance(len(batch))
        self.scores = torch.cat(parts)

    def best(self, count: int) -> list[list[int]]:
        """The `count` best rows for each question, best first; all rows if there are fewer."""
        rows: list[list[int]] = self.scores.topk(min(count, len(self.owners)), dim=1).indices.tolist()
        return rows

    def best_of(self, document_ids: Sequence[str]) -> list[list[int]]:
        """The best row of one document for each question."""
        rows: dict[str, list[int]] = {}
        for row, owner in enumerate(self.owners):
            rows.setdefault(owner, []).append(row)
        return [
            [max(rows[document_id], key=lambda row: float(scores[row]))]
            for document_id, scores in zip(document_ids, self.scores, strict=True)
        ]

    def tokens(self, rows: Sequence[int]) -> Tensor:
        """The memory tokens of rows side by side, `[rows * T, D]`, on the model's device."""
        model = self._model
        parts = []
        for row in rows:
            document_id, place = self._rows[row]
            parts.append(self._engine.bank[document_id].phi[place, : model.config.tokens])
        return torch.cat(parts).to(model.device, torch.float32)


@torch.no_grad()
def _scores(model: AmortizedModel, questions: Sequence[str], phi: Tensor) -> Tensor:
    """`[B, K]`: the document prior's scores of all rows, or the attention mass for a model without one."""
    prior = model.aggregation.prior
    if prior is None:
        return model.attention(questions, phi)
    encoder = model.input_encoder
    encoded = encoder.encode([encoder.ids(question) for question in questions], BATCH_TOKENS)
    keys = prior.keys(MemoryTokens.split(phi, model.config.lexical_vectors))
    return prior.score(prior.queries(encoded), keys)


@torch.no_grad()
def answers_from_two_texts(
    model: AmortizedModel, first: Sequence[FittedPrompt], second: Sequence[FittedPrompt], weight: float = 0.5
) -> list[str]:
    """Answers greedily without memory; of two prompts the more confident one chooses each token (the max rule).

    Args:
        first, second: B prompts each: the same questions after one text and after another.
        weight: lambda, the weight of the first.
    """
    lm, prompts = model.base_lm, [*first, *second]
    ids, mask = pad_rows([prompt.ids for prompt in prompts], lm.tokenizer.pad_token_id, lm.device, "left")
    processors: list[ExtractiveDecoding | MaxRuleEnsemble] = [MaxRuleEnsemble([weight] * len(first))]
    sources = model.span_sources(prompts)
    if sources is not None:
        extractive = ExtractiveDecoding(
            sources, prompt_length=ids.shape[1], end_tokens=lm.end_tokens, numerals=numeral_tokens(lm.tokenizer)
        )
        processors.insert(0, extractive)
    output = lm.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=model.config.max_new_tokens,
        do_sample=False,
        logits_processor=processors,
        pad_token_id=lm.tokenizer.pad_token_id,
        eos_token_id=lm.end_tokens,
    )
    answers = output[: len(first), ids.shape[1] :]
    texts: list[str] = lm.tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [text.strip() for text in texts]
