"""From questions to answers, in batches: retrieval, prompts, aggregation, generation, confidence.

Several calls of `MACEngine.answer` may share a batch. Bad input in one call is an error for that call only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from mac_rag.bank.base_reader import Aggregated, Reader
from mac_rag.bank.interface import BankContents, SharedBank
from mac_rag.batching_queue import Batch, isolating_errors
from mac_rag.data.characters import check_text
from mac_rag.data.metrics import comparable
from mac_rag.data.provenance import content_hash
from mac_rag.data.types import Answer, Decoded, Document, Source, Token
from mac_rag.errors import ConfigError
from mac_rag.lm.chat import Message
from mac_rag.lm.continuous_batch import ContinuousBatch
from mac_rag.lm.decoding import Sampling
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel, Phi
from mac_rag.model.calibration import Logistic, Mode
from mac_rag.progress import progress_bar
from mac_rag.retrieval.base import Hit, Retriever
from mac_rag.sources import LOOKED_AT, find_sources, in_letters_of, support_of, texts_read
from mac_rag.sync import is_held

# Documents of one question, the best first; those that were given as texts have an empty id.
Contexts: TypeAlias = tuple[Hit, ...]


# Answers calls, and finishes each of them. Yields what tells whether it has something to do again; until then, the LM
# goes on with its batch.
Steps: TypeAlias = Generator[Callable[[], bool], None, None]


@dataclass(frozen=True)
class Call:
    """Questions of one call of `MACEngine.answer`.

    Attributes:
        questions: texts or fitted prompts.
        contexts: documents for each question; None to retrieve them.
        begin: answers calls that may share a batch, by steps of the LM's batch.
        hear: called with the tokens of an answer that goes on, after each of them; True ends the answer there.
    """

    questions: Sequence[str | FittedPrompt]
    contexts: Sequence[Sequence[str]] | None
    begin: Callable[[Batch[Call], ContinuousBatch], Steps]
    hear: Callable[[Sequence[Token]], bool] | None = None


@dataclass(frozen=True)
class Settings:
    """The arguments that all calls of a batch have in common; `MACEngine.answer` documents them."""

    use_memory: bool
    use_retriever: bool
    k: int
    memory_weight: float | None
    allowed: Container[str] | None = field(compare=False)
    as_of: int | None  # in microseconds since 1970
    overflow: Literal["error", "truncate"]
    max_new_tokens: int | None
    sampling: Sampling
    sources: int = 0
    min_confidence: float | None = None
    batch_size: int = 32
    progress: bool = False

    def __post_init__(self) -> None:
        if self.sources < 0:
            raise ConfigError(f"sources is {self.sources}; give the most documents to name, or 0 for none")
        check_threshold(self.min_confidence)

    @property
    def group(self) -> Hashable:
        """A key that is equal for calls that may share a batch."""
        return self, group_of(self.allowed)


def conversation_prompt(
    model: MACModel,
    before: Sequence[Message],
    question: str,
    texts: Sequence[str],
    max_new_tokens: int | None,
) -> FittedPrompt:
    """Builds the chat prompt: the conversation, then the documents (truncated to fit) and the question in one turn.

    Args:
        model: a model whose prompt format is `chat`.
        before: the conversation before the question.
        question: the user's last message, which also queries the memory.
        texts: the documents, the best first.
        max_new_tokens: longest answer; None for the model's configured length.

    Raises:
        ConfigError, DocumentError, PromptError: as `MACModel.fit_conversation`.
    """
    turn = "".join(map(model.base_lm.prompts.written_document, texts)) + question
    messages = [*before, Message("user", turn)]
    return model.fit_conversation(messages, question=question, contexts=texts, max_new_tokens=max_new_tokens)


def group_of(allowed: Container[str] | None) -> Hashable:
    """A key that is equal for equal containers; a container that cannot be hashed equals only itself."""
    return allowed if isinstance(allowed, Hashable) else id(allowed)


@dataclass(frozen=True)
class _Prepared:
    """A question that is ready for the LM: its call and place in it, its prompt, its documents, and who hears it."""

    call: int
    place: int
    prompt: FittedPrompt
    hits: Contexts
    hear: Callable[[Sequence[Token]], bool] | None


def answer_together(calls: Batch[Call]) -> Generator[None, None, None]:
    """Answers calls, together with others that come while the LM writes; each step is one pass of the LM.

    Raises:
        Exception: what goes wrong in a pass that all calls share. What goes wrong with some of them only is an error of
            these.
    """
    batch = ContinuousBatch()
    works = [_Work(calls, batch)]
    try:
        while works:
            batch.step()
            works = [work for work in works if work.go_on()]
            works += [_Work(joined, batch) for joined in calls.joining()]
            works = [work for work in works if work.go_on()]
            yield
    finally:
        for work in works:
            work.close()


class _Work:
    """Calls that began together, and how far they are."""

    def __init__(self, calls: Batch[Call], batch: ContinuousBatch) -> None:
        self._calls = calls
        self._steps = calls[0].begin(calls, batch)
        self._is_due: Callable[[], bool] = lambda: True

    def go_on(self) -> bool:
        """Does what there is to do; False once all calls are finished."""
        while self._is_due():
            try:
                self._is_due = next(self._steps)
            except StopIteration:
                return False
            except Exception as error:
                for place in range(len(self._calls)):
                    self._calls.finish(place, error)
                return False
        return True

    def close(self) -> None:
        self._steps.close()


def answer_calls(
    calls: Batch[Call],
    settings: Settings,
    reader: Reader,
    retriever: ConsistentRetrieval | None,
    batch: ContinuousBatch,
) -> Steps:
    """Answers the questions of all calls. Each call is finished once its own questions are answered.

    What its own questions or its retrieval raise is an error of that call.

    Args:
        calls: the calls.
        settings: their common settings.
        reader: reads the bank with the model that answers.
        retriever: retrieves documents for questions without contexts; None for none.
        batch: the answers that the LM writes together.

    Raises:
        Exception: any error in what all calls share.
    """
    ready: list[_Prepared] = []
    asked = retriever if settings.use_retriever else None
    retrieved = isolating_errors(lambda some: _contexts_of_calls(some, settings, asked), calls)
    for number, (call, contexts) in enumerate(zip(calls, retrieved, strict=True)):
        try:
            ready += _prepared(number, call, contexts, settings, reader)
        except Exception as error:
            calls.finish(number, error)
        if not call.questions:
            calls.finish(number, [])
    ready.sort(key=lambda one: len(one.prompt.question) + sum(map(len, one.prompt.contexts)))
    answers: dict[int, dict[int, Answer]] = {}  # by call and place
    with progress_bar("answer", len(ready), disable=not settings.progress) as bar:

        def take(one: _Prepared, answer: Answer) -> None:
            own = answers.setdefault(one.call, {})
            own[one.place] = answer
            if len(own) == len(calls[one.call].questions):
                calls.finish(one.call, [own[place] for place in sorted(own)])
            bar.advance()

        for first in range(0, len(ready), settings.batch_size):
            yield from _answer(ready[first : first + settings.batch_size], settings, reader, batch, take)


def _contexts_of(
    questions: Sequence[str | FittedPrompt],
    contexts: Sequence[Sequence[str]] | None,
    retriever: ConsistentRetrieval | None,
    k: int,
    allowed: Container[str] | None,
) -> list[Contexts]:
    """The documents in front of each question: `contexts`, or k retrieved ones if `contexts` is None.

    Raises:
        DocumentError: for a question that is not a text with a visible character, before the retriever sees it.
    """
    for question in questions:
        if not isinstance(question, FittedPrompt):
            check_text(question)
    if contexts is not None:
        return [tuple(Hit("", text, 0.0) for text in texts) for texts in contexts]
    texts = [question for question in questions if isinstance(question, str)]
    if retriever is None or not texts:
        return [()] * len(questions)
    hits = iter(retriever.retrieve(texts, k, allowed=allowed))
    return [tuple(next(hits)) if isinstance(question, str) else () for question in questions]


def _contexts_of_calls(
    calls: Sequence[Call], settings: Settings, retriever: ConsistentRetrieval | None
) -> list[list[Contexts]]:
    """`_contexts_of` for each call, with one request to the retriever for all of them."""
    questions = [question for call in calls if call.contexts is None for question in call.questions]
    retrieved = iter(_contexts_of(questions, None, retriever, settings.k, settings.allowed))
    return [
        [next(retrieved) for _ in call.questions]
        if call.contexts is None
        else _contexts_of(call.questions, call.contexts, None, settings.k, settings.allowed)
        for call in calls
    ]


def _prepared(
    number: int, call: Call, contexts: list[Contexts] | Exception, settings: Settings, reader: Reader
) -> list[_Prepared]:
    """The questions of one call with their fitted prompts."""
    if isinstance(contexts, Exception):
        raise contexts
    prepared = []
    for place, (question, hits) in enumerate(zip(call.questions, contexts, strict=True)):
        prompt = question if isinstance(question, FittedPrompt) else _fitted(question, hits, settings, reader)
        prepared.append(_Prepared(number, place, prompt, hits, call.hear))
    return prepared


def _fitted(question: str, hits: Contexts, settings: Settings, reader: Reader) -> FittedPrompt:
    """The prompt of a question: documents that the reader reads from the bank are not in it; see `Reader.apart`."""

    def write(texts: Sequence[str]) -> FittedPrompt:
        return reader.model.fit_to_window(
            question, texts, overflow=settings.overflow, max_new_tokens=settings.max_new_tokens
        )

    apart = reader.apart(hits, settings.allowed) if settings.use_memory else ([], hits)
    return written(write, *apart)


def written(write: Callable[[Sequence[str]], FittedPrompt], read: Sequence[str], others: Sequence[Hit]) -> FittedPrompt:
    """The prompt that `write` makes from the texts of other documents than those that are read from the bank."""
    return replace(write([hit.text for hit in others]), read=tuple(read))


def _answer(
    asked_together: Sequence[_Prepared],
    settings: Settings,
    reader: Reader,
    batch: ContinuousBatch,
    take: Callable[[_Prepared, Answer], object],
) -> Steps:
    """Answers questions in one batch, and hands each over when it has ended."""
    prompts = [one.prompt for one in asked_together]
    aggregated = None
    if settings.use_memory:
        aggregated = aggregate_prompts(reader, prompts, settings.allowed, mass=settings.sources > 0)
    mass = None if aggregated is None else aggregated.mass
    masses = None if mass is None else reader.by_document(mass, settings.allowed)

    def told(rows: Sequence[int], texts: Sequence[Decoded]) -> list[Answer]:
        some, asked = [asked_together[row] for row in rows], [prompts[row] for row in rows]
        sources: list[tuple[Source, ...]] = [()] * len(rows)
        if settings.sources:
            own = None if masses is None else masses.of_questions(rows)
            read = [texts_read(one.hits, one.prompt) for one in some]
            sources = find_sources([prompt.question for prompt in asked], texts, read, own, reader, settings.sources)
        written = in_their_letters(reader, asked, texts, sources, settings.allowed, with_memory=settings.use_memory)
        answers = [
            Answer(
                text,
                one.prompt.contexts,
                tuple(hit.document_id for hit in one.hits if hit.document_id),
                one.prompt.truncated,
                0.0 if aggregated is None else float(aggregated.discarded[row]),
                found,
                decoded=decoded,
                prompt_tokens=len(one.prompt.ids),
            )
            for row, one, decoded, text, found in zip(rows, some, texts, written, sources, strict=True)
        ]
        if settings.min_confidence is None:
            return answers
        phi = None if aggregated is None else aggregated.phi
        evidence = evidence_from(reader, asked, texts, phi, settings.allowed)
        return doubted(reader.model, asked, answers, evidence, settings.min_confidence)

    # What needs further passes of the LM or of the memory is done for all questions at once.
    waits = settings.min_confidence is not None or not reader.model.base_lm.keeps_letters
    left, ended = len(prompts), dict[int, Decoded]()

    def hear(row: int, said: Sequence[Token]) -> bool:
        own = asked_together[row].hear
        return own is not None and own(said)

    parts = reader.model.begin(
        batch,
        prompts,
        ended.__setitem__,
        hear=hear,
        modulation=None if aggregated is None else aggregated.phi,
        max_new_tokens=settings.max_new_tokens,
        memory_weight=settings.memory_weight,
        sampling=settings.sampling,
    )

    def is_due() -> bool:
        return len(ended) == left if waits else bool(ended)

    try:
        while left:
            yield lambda: is_due() or any(part.error for part in parts)
            for part in parts:
                part.check()
            rows = sorted(ended)
            texts = [ended.pop(row) for row in rows]
            for row, answer in zip(rows, told(rows, texts), strict=True):
                take(asked_together[row], answer)
            left -= len(rows)
    finally:
        for part in parts:
            batch.drop(part)


def in_their_letters(
    reader: Reader,
    prompts: Sequence[FittedPrompt],
    answers: Sequence[str],
    sources: Sequence[Sequence[Source]],
    allowed: Container[str] | None,
    *,
    with_memory: bool,
) -> list[str]:
    """The answers of an LM whose tokenizer drops case, accents or spaces, as the documents write them.

    An answer that stands in no text of the prompt, of the sources or, in a bank that keeps texts, of the documents with
    most attention stays as it is, and so does an abstention.
    """
    model = reader.model
    if model.base_lm.keeps_letters:
        return list(answers)
    written = [
        answer if is_abstention(model, answer) else in_letters_of(answer, found, prompt.contexts)
        for prompt, answer, found in zip(prompts, answers, sources, strict=True)
    ]
    rest = [row for row, answer in enumerate(written) if answer is None]
    if rest and with_memory and reader.bank.keep_texts:
        some, their = [prompts[row] for row in rest], [answers[row] for row in rest]
        with suppress(ConfigError):  # an attention that does not tell single documents apart
            mass = aggregate_prompts(reader, some, allowed, mass=True).mass
            assert mass is not None
            asked, masses = [prompt.question for prompt in some], reader.by_document(mass, allowed)
            remembered = find_sources(asked, their, [{}] * len(some), masses, reader, LOOKED_AT)
            for row, answer, found in zip(rest, their, remembered, strict=True):
                written[row] = in_letters_of(answer, found)
    return [answer if text is None else text for answer, text in zip(answers, written, strict=True)]


def aggregate_prompts(
    reader: Reader, prompts: Sequence[FittedPrompt], allowed: Container[str] | None, *, mass: bool = False
) -> Aggregated:
    """phi* of each prompt's question, and with `mass` the attention mass, too; see `Reader.aggregate`."""
    ids, read = [prompt.question_ids for prompt in prompts], [prompt.read for prompt in prompts]
    return reader.aggregate([prompt.question for prompt in prompts], allowed, ids=ids, mass=mass, read=read)


def evidence_from(
    reader: Reader,
    prompts: Sequence[FittedPrompt],
    answers: Sequence[str],
    phi: Phi | None,
    allowed: Container[str] | None,
) -> Tensor:
    """`evidence_of` with the evidence of the bank's prior: `[B, len(EVIDENCE)]`. `phi` is None without memory."""
    questions = [prompt.question for prompt in prompts]
    prior = None if phi is None else reader.prior_evidence(questions, allowed)
    return evidence_of(reader.model, prompts, answers, phi, prior)


class ConsistentRetrieval:
    """The retriever for a question that sees one snapshot of the bank.

    A change reaches the retriever before it is committed to the bank. If only some documents are allowed, they may have
    been chosen by their metadata in the snapshot, and that choice may not hold for a new version of a document. So new
    versions are left out while they are being written.

    Args:
        retriever: the retriever.
        bank: the bank that changes together with it.
        snapshot: the question's snapshot of the bank.
        changes: `bank.changes` before the snapshot was taken.
    """

    def __init__(self, retriever: Retriever, bank: SharedBank, snapshot: BankContents, changes: int) -> None:
        self._retriever = retriever
        self._bank = bank
        self._snapshot = snapshot
        self._changes = changes

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        """See `Retriever.retrieve`."""
        hits = self._retriever.retrieve(questions, k, allowed=allowed)
        was_changed = self._changes % 2 or self._bank.changes != self._changes
        if allowed is None or not was_changed or not self._tells():
            return hits
        return [[hit for hit in row if not self._is_new(hit)] for row in hits]

    def _tells(self) -> bool:
        """True if the retriever tells what it holds; its documents are then those of the bank."""
        try:
            self._retriever.content_hashes([])
        except ConfigError:
            return False
        return True

    def _is_new(self, hit: Hit) -> bool:
        name = hit.document_id
        return name in self._snapshot and not is_held(
            self._snapshot, name, content_hash(Document(name, hit.text, hit.metadata))
        )


# The abstention of a model whose prompt format has not learned one.
I_DO_NOT_KNOW = "I don't know"


def calibration_of(model: MACModel, mode: Mode) -> Logistic:
    """The logistic model for one way of answering.

    Raises:
        ConfigError: if none was fitted for the model's present weights, or none for this way of answering.
    """
    calibration = model.calibration
    remedy = (
        "fit one with: python -m pipelines.calibrate --model FOLDER --data NAME:PATH"
        f"{' --retriever NAME' if mode == 'documents' else ''}"
    )
    if calibration is None:
        raise ConfigError(f"the model has no calibration, which min_confidence needs; {remedy}")
    if calibration.fingerprint != model.fingerprint:
        raise ConfigError(f"the model's calibration was fitted for other weights; {remedy}")
    if mode not in calibration.modes:
        way = "with documents in front of the question" if mode == "documents" else "from memory alone"
        raise ConfigError(f"the model's calibration was not fitted for answers {way}; {remedy}")
    return calibration.modes[mode]


def mode_of(prompt: FittedPrompt) -> Mode:
    """The way a prompt is answered: with documents that were found for it, or from memory alone."""
    return "documents" if prompt.contexts or prompt.read else "memory"


def check_threshold(min_confidence: float | None) -> None:
    """Checks a `min_confidence`.

    Raises:
        ConfigError: for a value outside [0, 1].
    """
    if min_confidence is not None and not 0 <= min_confidence <= 1:
        raise ConfigError(f"min_confidence is {min_confidence}; give a probability from 0 to 1")


def confidences(model: MACModel, prompts: Sequence[FittedPrompt], evidence: Tensor) -> list[float]:
    """The probability that each answer is right, from its evidence `[B, len(EVIDENCE)]`.

    Raises:
        ConfigError: as `calibration_of`.
    """
    fits = {mode: calibration_of(model, mode) for mode in {mode_of(prompt) for prompt in prompts}}
    return [
        float(fits[mode_of(prompt)].probability(row[None])[0]) for prompt, row in zip(prompts, evidence, strict=True)
    ]


def doubted(
    model: MACModel,
    prompts: Sequence[FittedPrompt],
    answers: Sequence[Answer],
    evidence: Tensor,
    min_confidence: float,
) -> list[Answer]:
    """Returns the answers with their confidence, and with "I don't know" in place of those below `min_confidence`.

    Raises:
        ConfigError: as `calibration_of`.
    """
    refusal = model.config.prompt.abstention or I_DO_NOT_KNOW
    told = [
        replace(answer, confidence=sure)
        for answer, sure in zip(answers, confidences(model, prompts, evidence), strict=True)
    ]
    return [
        replace(answer, text=refusal, guess=answer.text) if (answer.confidence or 0.0) < min_confidence else answer
        for answer in told
    ]


@torch.no_grad()
def evidence_of(
    model: MACModel,
    prompts: Sequence[FittedPrompt],
    answers: Sequence[str],
    phi: Phi | None,
    prior: Tensor | None,
) -> Tensor:
    """Evidence about B answers, `[B, len(EVIDENCE)]` in float32 on the CPU.

    - `prior`: the document prior of the best row before the softmax and its scale: a cosine, plus the product of the
      lexical vectors; for an LM's own keys and values, of the best document. Unlike attention, it is low if no document
      is about the question.
    - `prior_odds`: the log-odds of that row's share of the prior: how far it is ahead of all others together.
    - `first_log_probability`: the log-probability of the answer's first token under the LM with memory.
    - `log_probability`: the mean log-probability of all tokens of the answer, the end token included.
    - `log_probability_without_memory`: the same mean under the LM without memory, if there are documents in front. An
      answer on which memory and documents agree is right more often.
    - `repetition`: the share of the answer's words that occur in the question, 1 for an answer without words. An LM
      that does not know often repeats the question.
    - `support`: if there are documents in front, the share of the question's words in the sentence that says the
      answer; 0 if no sentence does.
    - `abstention`: 1 for an answer that is the abstention which the LM has learned. The LM may be sure of it, but it is
      never right.
    - `answering_odds`: for an LM that has learned to abstain, the log-odds that it answers. They drop if memory
      or documents do not hold the answer, even while all answers together are more probable than an abstention.

    Attention is no evidence: its shares sum to 1 for any question.

    A missing number, such as the prior of an answer without memory, is 0.

    Args:
        model: the model.
        prompts: B prompts.
        answers: B answers.
        phi: `[B, T, D]`; None for answers without memory.
        prior: `[B, 2]`, see `mac_rag.bank.base_reader.Reader.prior_evidence`; None without memory or prior.
    """
    first, mean = model.score_answers(prompts, answers, modulation=phi)
    alone = torch.zeros(len(prompts))
    rows = [row for row, prompt in enumerate(prompts) if prompt.contexts and phi is not None]
    if rows:
        _, alone[rows] = model.score_answers([prompts[row] for row in rows], [answers[row] for row in rows])
    repeated = [repetition(prompt.question, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    supported = [supported_by(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    abstained = [float(is_abstention(model, answer)) for answer in answers]
    best = torch.zeros(len(prompts), 2) if prior is None else prior.float().cpu()
    words = torch.tensor([repeated, supported, abstained]).T
    odds = model.answering_odds(prompts, modulation=phi)
    odds = torch.zeros(len(prompts)) if odds is None else odds
    return torch.cat([best, torch.stack([first, mean, alone], 1), words, odds[:, None]], 1)


def is_abstention(model: MACModel, answer: str) -> bool:
    """True if an answer is the abstention that the model has learned."""
    abstention = model.config.prompt.abstention
    return abstention is not None and comparable(answer) == comparable(abstention)


def supported_by(prompt: FittedPrompt, answer: str) -> float:
    """Share of the question's words in the sentence of its documents that says an answer; 0 if no sentence does."""
    supports = [support_of(text, answer, prompt.question) for text in prompt.contexts]
    return max((support.overlap for support in supports if support is not None), default=0.0)


def repetition(question: str, answer: str) -> float:
    """The share of an answer's words that occur in the question; 1 for an answer without words.

    Examples:
        >>> repetition("Who opened the bridge in May?", "the bridge of Anna Berg")
        0.25
    """
    question_words, answer_words = set(comparable(question).split()), comparable(answer).split()
    return sum(word in question_words for word in answer_words) / len(answer_words) if answer_words else 1.0
