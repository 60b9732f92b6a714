"""From a question to an answer with its sources, for every API of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mac_rag.asking import calibration_of, conversation_prompt, mode_of
from mac_rag.data.types import Decoded, Token
from mac_rag.engine import MACEngine
from mac_rag.errors import CancelledError
from mac_rag.lm.chat import Message
from mac_rag.lm.decoding import GREEDY, Sampling
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.retrieval.base import Hit
from mac_rag.server.catalog import ServedBank
from mac_rag.sources import texts_read

if TYPE_CHECKING:
    from mac_rag.data.types import Source
    from mac_rag.retrieval.dense import Encoder
    from mac_rag.server.metrics import Metrics


# Questions of one request, and texts to embed, in one turn of the model, as long as no other client waits for it.
_TOGETHER = 32
_CONTEXT = 4  # tokens before one that tell how it is written, such as with a space
_LOWEST = -9999.0  # log-probability of what was impossible, for JSON has no -inf


@dataclass(frozen=True)
class ServedQuestion:
    """A question, and how to answer it: most fields are as `MACEngine.answer` takes them.

    Attributes:
        bank: the bank to ask; None for the LM alone.
        before: the conversation before the question; only a model whose prompt format is a chat reads it.
    """

    text: str
    bank: ServedBank | None
    before: tuple[Message, ...] = ()
    use_memory: bool = True
    use_retriever: bool = True
    k: int | None = None
    memory_weight: float | None = None
    allowed: frozenset[str] | None = None
    as_of: str | None = None
    sampling: Sampling = GREEDY
    max_new_tokens: int | None = None
    sources: int = 0
    min_confidence: float | None = None

    @property
    def seen(self) -> dict[str, Any]:
        """What of the bank has influence, as every method of an engine takes it."""
        return {
            "use_memory": self.bank is not None and self.use_memory,
            "allowed": self.allowed,
            "as_of": self.as_of,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """How it is answered, as `MACEngine.answer` and `stream` take it."""
        decoding = {"max_new_tokens": self.max_new_tokens, "sampling": self.sampling}
        return {**self.seen, **decoding, "memory_weight": self.memory_weight}


class Piece(NamedTuple):
    """A piece of a streamed answer: its text, and `Reply.logprobs` of its tokens."""

    text: str
    logprobs: list[dict[str, Any]] | None = None


@dataclass
class Reply:
    """An answer.

    Attributes:
        prompt_tokens, completion_tokens: numbers of tokens of prompt and answer, without the one that ends it.
        is_cut: True if the answer has the most tokens that it may have.
        retrieved: ids of the documents in front of the question, the best first.
        truncated, sources, confidence, guess: as `Answer` has them.
        logprobs: each token of the LM's answer as OpenAI's API describes it; None if the request does not ask for it.
    """

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cut: bool = False
    sources: Sequence[Source] = ()
    retrieved: list[str] = field(default_factory=list)
    truncated: bool = False
    confidence: float | None = None
    guess: str | None = None
    logprobs: list[dict[str, Any]] | None = None


class Asking:
    """Answers questions to any of the server's banks, and to the LM alone.

    Args:
        alone: an engine of the model with an empty bank.
        metrics: measures the parts of requests.
    """

    def __init__(self, alone: MACEngine, metrics: Metrics) -> None:
        self._alone = alone
        self._metrics = metrics

    @property
    def reads_conversations(self) -> bool:
        """True if the model reads more than the last message."""
        return self._alone.model.config.prompt.chat

    @property
    def longest_answer(self) -> int:
        """Most tokens of an answer: half of the LM's window, so that half is left for the prompt."""
        return max(1, self._alone.model.context_window // 2)

    @property
    def usual_answer(self) -> int:
        """Most tokens of an answer if a request does not say."""
        return self._alone.model.config.max_new_tokens

    def answer(self, questions: Sequence[ServedQuestion], cancelled: Callable[[], bool] | None = None) -> list[Reply]:
        """Answers questions, in batches with those of other threads if possible.

        Args:
            questions: questions that differ only in their texts.
            cancelled: as `MACEngine.answer` takes it.

        Raises:
            MACError: as `MACEngine.answer`.
        """
        if len(questions) > (together := self._together):
            first = self.answer(questions[:together], cancelled)
            return first + self.answer(questions[together:], cancelled)
        like = questions[0]
        prompts = [self._prompt(question) for question in questions] if self._is_conversation(like) else None
        with self._metrics.part("answer"):
            answers = self._engine(like).answer(
                [question.text for question in questions] if prompts is None else [prompt for prompt, _ in prompts],
                **like.settings,
                use_retriever=like.use_retriever,
                k=like.k,
                overflow="truncate",
                sources=0 if prompts is not None or like.bank is None else like.sources,
                min_confidence=like.min_confidence,
                cancelled=cancelled,
            )
        replies = []
        for place, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            assert answer.decoded is not None
            reply = self._counted(question, answer.decoded, answer.prompt_tokens)
            if prompts is None:
                reply.retrieved, reply.sources = list(answer.document_ids), answer.sources
            else:
                prompt, hits = prompts[place]
                reply.retrieved = [hit.document_id for hit in hits]
                reply.sources = self._sources(question, answer.said, hits, prompt)
            reply.text, reply.truncated = answer.text, answer.truncated
            reply.confidence, reply.guess = answer.confidence, answer.guess
            replies.append(reply)
        return replies

    def stream(self, question: ServedQuestion) -> Iterator[Piece | Reply]:
        """Yields the answer piece by piece, and then the reply.

        With a `min_confidence` above 0 the answer is one piece, because another may take its place.

        Raises:
            MACError: as `MACEngine.stream`, before the first piece.
        """
        if question.min_confidence:
            [whole] = self.answer([question])
            yield Piece(whole.text, whole.logprobs)
            yield whole
            return
        prompt, hits = self._prompt(question)
        fit = None if question.min_confidence is None else calibration_of(self._alone.model, mode_of(prompt))
        said = Decoded("")
        with self._metrics.part("stream"):
            for piece in self._engine(question).stream(prompt, **question.settings):
                logprobs = self._logprobs(question, piece.tokens, said.tokens)
                said = Decoded(said + piece, said.tokens + piece.tokens, piece.ended)
                if piece or logprobs:
                    yield Piece(piece, logprobs)
        reply = self._counted(question, said, len(prompt.ids))
        reply.retrieved, reply.truncated = [hit.document_id for hit in hits], prompt.truncated
        if fit is not None:
            evidence = self._engine(question).evidence([prompt], [said], **question.seen)
            [reply.confidence] = fit.probability(evidence).tolist()
        reply.sources = self._sources(question, reply.text, hits, prompt)
        yield reply

    def search(
        self, bank: ServedBank, text: str, k: int, allowed: frozenset[str] | None, as_of: str | None
    ) -> list[Hit]:
        """The documents that the bank's retriever finds.

        Raises:
            MACError: as `MACEngine.retrieve`.
        """
        with self._metrics.part("search"):
            [hits] = bank.engine.retrieve([text], k=k, allowed=allowed, as_of=as_of)
            return hits

    def embed(self, encoder: Encoder, texts: Sequence[str], cancelled: Callable[[], bool]) -> list[Any]:
        """The vectors of texts.

        Raises:
            CancelledError: if `cancelled` returned True.
        """
        vectors: list[Any] = []
        with self._metrics.part("embed"):
            while len(vectors) < len(texts):
                if cancelled():
                    raise CancelledError("nobody waits for these vectors any more")
                with self._alone.turn():
                    vectors += list(encoder.questions(texts[len(vectors) :][: self._together]))
        return vectors

    @property
    def _together(self) -> int:
        """Most questions of one request, and most texts to embed, in one turn of the model."""
        return 1 if self._alone.is_shared else _TOGETHER

    def _engine(self, question: ServedQuestion) -> MACEngine:
        return self._alone if question.bank is None else question.bank.engine

    def _retrieved(self, question: ServedQuestion) -> list[Hit]:
        if question.bank is None or not question.use_retriever or question.bank.engine.retriever is None:
            return []
        k = question.bank.engine.k if question.k is None else question.k
        return self.search(question.bank, question.text, k, question.allowed, question.as_of)

    def _is_conversation(self, question: ServedQuestion) -> bool:
        """True if this class retrieves the documents of an answer, and not the engine, for all of a batch at once."""
        return bool(question.before) and self.reads_conversations

    def _prompt(self, question: ServedQuestion) -> tuple[FittedPrompt, list[Hit]]:
        """The prompt of a question, and its retrieved documents."""
        model, longest = self._alone.model, question.max_new_tokens

        def write(texts: Sequence[str]) -> FittedPrompt:
            if self._is_conversation(question):
                return conversation_prompt(model, question.before, question.text, texts, longest)
            return model.fit_to_window(question.text, texts, overflow="truncate", max_new_tokens=longest)

        hits = self._retrieved(question)
        return self._engine(question).fit(hits, write, **question.seen), hits

    def _counted(self, question: ServedQuestion, said: Decoded, prompt_tokens: int) -> Reply:
        tokens = len(said.tokens)
        most = self.usual_answer if question.max_new_tokens is None else question.max_new_tokens
        is_cut = tokens >= most and not said.ended
        return Reply(str(said), prompt_tokens, tokens, is_cut, logprobs=self._logprobs(question, said.tokens))

    def _logprobs(
        self, question: ServedQuestion, tokens: Sequence[Token], before: Sequence[Token] = ()
    ) -> list[dict[str, Any]] | None:
        """`Reply.logprobs` of tokens after others; None if they were not asked for."""
        if question.sampling.log_probabilities is None:
            return None
        decode = self._alone.model.base_lm.tokenizer.decode
        ids = [token.id for token in [*before, *tokens]]

        def described(place: int, token: int, score: float | None) -> dict[str, Any]:
            context = ids[max(0, place - _CONTEXT) : place]
            text = decode([*context, token])[len(decode(context)) :] or decode([token])
            logprob = _LOWEST if score is None else max(score, _LOWEST)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

        return [
            {
                **described(place, token.id, token.log_probability),
                "top_logprobs": [described(place, one, score) for one, score in token.alternatives],
            }
            for place, token in enumerate(tokens, len(before))
        ]

    def _sources(
        self, question: ServedQuestion, answer: str, hits: Sequence[Hit], prompt: FittedPrompt
    ) -> tuple[Source, ...]:
        """The sources of an answer if this class retrieved its documents."""
        if question.bank is None or not question.sources:
            return ()
        with self._metrics.part("sources"):
            texts = texts_read(hits, prompt)
            return question.bank.engine.sources(prompt, answer, most=question.sources, texts=texts, **question.seen)
