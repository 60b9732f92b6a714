"""`/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/v1/embeddings`, compatible with OpenAI's clients."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from secrets import token_hex
from typing import Any

import anyio
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from mac_rag.errors import MACError
from mac_rag.lm.chat import Message
from mac_rag.lm.decoding import Sampling
from mac_rag.server.api_errors import APIError, error_of, no_such_model
from mac_rag.server.asking import Piece, Reply, ServedQuestion
from mac_rag.server.catalog import ServedBank
from mac_rag.server.keys import Principal
from mac_rag.server.requests import (
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Reader,
    StrictRoute,
)
from mac_rag.server.service import EMBEDDING_MODEL, Service
from mac_rag.server.structured import Wanted, conversation, wanted
from mac_rag.sources import source_record

_log = logging.getLogger(__name__)
_SEEDS = 2**63
_NEVER = -1e9  # bias against a token that is to be chosen only if no other is possible
# Fields of other servers that change how a token is drawn.
_NOT_DRAWN = ("typical_p", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "top_n_sigma")
# The description of a response that is a stream if the request says so.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}, "description": "The answer."}}


def routes(service: Service) -> APIRouter:
    """The routes of one server."""
    router = APIRouter(prefix="/v1", route_class=StrictRoute)

    @router.get("/models")
    def models(who: Reader) -> dict[str, Any]:
        """The model alone, and each bank as `MODEL:BANK`."""
        names = [service.model_name, *(f"{service.model_name}:{bank.name}" for bank in service.banks(who))]
        return {"object": "list", "data": [_model(service, name) for name in [*names, EMBEDDING_MODEL]]}

    @router.get("/models/{name:path}")
    def model(name: str, who: Reader) -> dict[str, Any]:
        """One model."""
        if name != EMBEDDING_MODEL:
            _bank(service, name, None, who)
        return _model(service, name)

    @router.post("/chat/completions", response_model=None, responses=STREAMED)
    async def chat(body: ChatRequest, request: Request, who: Reader) -> Response:
        """Answers the last message."""
        asked = wanted(body, is_chat=service.asking.reads_conversations)
        question, notes = await question_of(service, body, who, request, conversation(body.messages, asked))
        shape = _Chat(body.model, notes, asked)
        questions = _choices([question], body.n)
        if not body.stream:
            return await _answered(service, request, questions, shape)
        if asked is not None:
            replies = await service.questions.run(partial(_replies, service, questions), request, units=len(questions))
            return events_of(shape.at_once(replies, body.stream_options.include_usage))
        return await _streamed(service, questions, shape, body.stream_options.include_usage)

    @router.post("/completions", response_model=None, responses=STREAMED)
    async def complete(body: CompletionRequest, request: Request, who: Reader) -> Response:
        """Answers one prompt or several."""
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        question, notes = await question_of(service, body, who, request, [])
        questions = _choices([replace(question, text=service.checked_question(text)) for text in texts], body.n)
        shape = _Completion(body.model, notes)
        if body.stream:
            return await _streamed(service, questions, shape, body.stream_options.include_usage)
        return await _answered(service, request, questions, shape)

    @router.post("/embeddings", response_model=None)
    async def embed(body: EmbeddingRequest, request: Request, _: Reader) -> Response:
        """Vectors of texts, by the sentence encoder."""
        if body.model != EMBEDDING_MODEL:
            raise no_such_model(body.model)
        texts = [
            service.checked_question(text) for text in ([body.input] if isinstance(body.input, str) else body.input)
        ]
        service.check_total(texts)

        def work(gone: Callable[[], bool]) -> dict[str, Any]:
            encoder = service.encoder()
            if body.dimensions not in (None, encoder.width):
                raise APIError(
                    400,
                    f"dimensions is {body.dimensions}, and vectors have {encoder.width}; leave it out",
                    param="dimensions",
                )
            vectors = service.asking.embed(encoder, texts, gone)
            data = [
                {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
                for index, vector in enumerate(vectors)
            ]
            tokens = sum(len(service.model.base_lm.prompts.texts.ids(text)) for text in texts)
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return {"object": "list", "model": body.model, "data": data, "usage": usage}

        return await service.reads.respond(work, request)

    return router


class _Shape:
    """Writes replies as JSON, as a whole and as pieces of a stream.

    Args:
        model: the request's name of the model.
        notes: what the client should know about its request.
    """

    prefix = kind = piece_kind = ""

    def __init__(self, model: str, notes: list[str]) -> None:
        self._head = {"id": f"{self.prefix}-{token_hex(12)}", "created": int(time.time()), "model": model}
        self._notes = notes

    def choice(self, index: int, reply: Reply) -> dict[str, Any]:
        raise NotImplementedError

    def part(self, text: str | None, first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, tokens: list[dict[str, Any]] | None, offset: int = 0) -> dict[str, Any] | None:
        raise NotImplementedError

    def whole(self, replies: list[Reply]) -> dict[str, Any]:
        choices = [
            {"logprobs": self.logprobs(reply.logprobs), "finish_reason": _finish(reply), **self.choice(index, reply)}
            for index, reply in enumerate(replies)
        ]
        own = own_fields(replies[0], self._notes)
        if len(replies) > 1:
            for choice, reply in zip(choices, replies):
                choice["sources"] = _sources(reply)
                choice["confidence"] = reply.confidence
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage_of(replies), **own}

    def _chunk(
        self, index: int, part: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "object": self.piece_kind, "choices": [choice]}

    def piece(self, index: int, piece: Piece, offset: int | None) -> dict[str, Any]:
        """A piece after so many characters; None for the first one."""
        logprobs = self.logprobs(piece.logprobs, offset or 0)
        return self._chunk(index, self.part(piece.text, offset is None), logprobs)

    def end(self, index: int, reply: Reply, finish: str | None = None) -> dict[str, Any]:
        chunk = self._chunk(index, self.part(None, False), finish=finish or _finish(reply))
        return {**chunk, **own_fields(reply, self._notes)}

    async def at_once(self, replies: list[Reply], with_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """A stream with each reply as one piece, for replies that are only known as a whole."""
        empty = {"usage": None} if with_usage else {}
        for index, reply in enumerate(replies):
            whole = self.choice(index, reply)
            message = whole.pop("message")
            for number, call in enumerate(message.get("tool_calls", ())):
                call["index"] = number
            yield {**self._chunk(index, {"delta": message}, self.logprobs(reply.logprobs)), **empty}
            yield {**self.end(index, reply, whole.get("finish_reason")), **empty}
        if with_usage:
            yield self.usage(replies)

    def usage(self, replies: list[Reply]) -> dict[str, Any]:
        return {**self._head, "object": self.piece_kind, "choices": [], "usage": usage_of(replies)}


class _Chat(_Shape):
    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, notes: list[str], asked: Wanted | None) -> None:
        super().__init__(model, notes)
        self._asked = asked

    def choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message = {"role": "assistant", "content": reply.text, "refusal": None}
        if self._asked is not None:
            message = self._asked.message(reply.text)
        calls = {"finish_reason": "tool_calls"} if "tool_calls" in message else {}
        return {"index": index, "message": message, **calls}

    def part(self, text: str | None, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {} if text is None else {"content": text}
        return {"delta": {"role": "assistant", **delta} if first else delta}

    def logprobs(self, tokens: list[dict[str, Any]] | None, offset: int = 0) -> dict[str, Any] | None:
        return None if tokens is None else {"content": tokens, "refusal": None}


class _Completion(_Shape):
    prefix = "cmpl"
    kind = piece_kind = "text_completion"

    def choice(self, index: int, reply: Reply) -> dict[str, Any]:
        return {"index": index, "text": reply.text}

    def part(self, text: str | None, first: bool) -> dict[str, Any]:
        return {"text": text or ""}

    def logprobs(self, tokens: list[dict[str, Any]] | None, offset: int = 0) -> dict[str, Any] | None:
        if tokens is None:
            return None
        texts = [token["token"] for token in tokens]
        whole = "".join(texts)
        dropped = 0 if offset else len(whole) - len(whole.lstrip())  # the text begins without the first token's space
        starts = accumulate(map(len, texts), initial=offset - dropped)
        return {
            "tokens": texts,
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{one["token"]: one["logprob"] for one in token["top_logprobs"]} for token in tokens],
            "text_offset": [max(0, start) for _, start in zip(texts, starts)],
        }


def usage_of(replies: list[Reply]) -> dict[str, int]:
    """Numbers of tokens of all prompts and answers."""
    prompt = sum(reply.prompt_tokens for reply in replies)
    completion = sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _sources(reply: Reply) -> list[dict[str, Any]]:
    said = reply.text if reply.guess is None else reply.guess
    return [source_record(source, said) for source in reply.sources]


def own_fields(reply: Reply, notes: list[str]) -> dict[str, Any]:
    """The fields that this server adds to OpenAI's."""
    own: dict[str, Any] = {"sources": _sources(reply), "confidence": reply.confidence, "guess": reply.guess}
    return {**own, "retrieved": reply.retrieved, "truncated": reply.truncated, "notes": notes}


def _finish(reply: Reply) -> str:
    return "length" if reply.is_cut else "stop"


def _choices(questions: list[ServedQuestion], n: int) -> list[ServedQuestion]:
    """Each question n times. With a seed, each time with the next one, or all answers would be the same."""
    return [
        question
        if question.sampling.seed is None
        else replace(question, sampling=replace(question.sampling, seed=(question.sampling.seed + number) % _SEEDS))
        for question in questions
        for number in range(n)
    ]


def _replies(service: Service, questions: list[ServedQuestion], gone: Callable[[], bool]) -> list[Reply]:
    """The answers to questions that differ only in their texts and seeds. Those of one seed share batches."""
    answers: dict[int, Reply] = {}
    for seed in dict.fromkeys(question.sampling.seed for question in questions):
        places = [place for place, question in enumerate(questions) if question.sampling.seed == seed]
        answers |= zip(places, service.asking.answer([questions[place] for place in places], gone), strict=True)
    return [answers[place] for place in range(len(questions))]


async def _answered(service: Service, request: Request, questions: list[ServedQuestion], shape: _Shape) -> Response:
    """The answers to all questions, in one response."""
    return await service.questions.respond(
        lambda gone: shape.whole(_replies(service, questions, gone)), request, units=len(questions)
    )


async def _streamed(service: Service, questions: list[ServedQuestion], shape: _Shape, with_usage: bool) -> Response:
    """The answers as server-sent events, one after the other. An error before the first piece is a plain response."""
    streams = [service.questions.stream(partial(service.asking.stream, question)) for question in questions]
    first = await anext(streams[0])
    empty = {"usage": None} if with_usage else {}

    async def events() -> AsyncIterator[dict[str, Any]]:
        replies: list[Reply] = []
        try:
            for index, stream in enumerate(streams):
                said: int | None = None  # characters
                async for item in first_and_rest(first, stream) if index == 0 else stream:
                    if isinstance(item, Piece) or said is None:
                        piece = item if isinstance(item, Piece) else Piece("")
                        yield {**empty, **shape.piece(index, piece, said)}
                        said = (said or 0) + len(piece.text)
                    if isinstance(item, Reply):
                        replies.append(item)
                        yield {**empty, **shape.end(index, item)}
            if with_usage:
                yield shape.usage(replies)
        finally:
            # Shielded, because a task that is cancelled when the client has gone can wait for nothing.
            with anyio.CancelScope(shield=True):
                for stream in streams:
                    await stream.aclose()

    return events_of(events())


async def first_and_rest(first: Piece | Reply, rest: AsyncIterator[Piece | Reply]) -> AsyncIterator[Piece | Reply]:
    """The items of a stream whose first one was already read."""
    yield first
    async for item in rest:
        yield item


def events_of(contents: AsyncIterator[dict[str, Any]], *, named: bool = False) -> Response:
    """Objects as server-sent events; an error ends them. `named`: the type of an object is also the event's name."""

    def written(content: dict[str, Any]) -> bytes:
        name = f"event: {content['type']}\n" if named else ""
        # In ASCII, because some clients also end a line at U+2028, U+2029 and U+0085.
        return f"{name}data: {json.dumps(content)}\n\n".encode()

    async def events() -> AsyncIterator[bytes]:
        try:
            async for content in contents:
                yield written(content)
        except Exception as error:
            if not isinstance(error, APIError | MACError):
                _log.exception("a stream failed")
            fault = error_of(error)
            yield written({"type": "error", **fault.body, **(fault.body["error"] if named else {})})
        if not named:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def question_of(
    service: Service, body: AnswerRequest, who: Principal, request: Request, messages: Sequence[Message]
) -> tuple[ServedQuestion, list[str]]:
    """The question of a request, which is the last message if there are some; and notes for its client."""
    bank = _bank(service, body.model, body.bank, who)
    if bank is None and (body.filters or body.as_of):
        raise APIError(400, "filters and as_of need a bank; name one: model MODEL:BANK", param="model")
    if bank is None and body.min_confidence is not None:
        raise APIError(400, "min_confidence needs a bank; name one: model MODEL:BANK", param="min_confidence")
    if messages and messages[-1].role != "user":
        raise APIError(
            400,
            f"the last message has the role {messages[-1].role}; end with the user's, which is the question",
            param="messages",
        )
    service.check_total(message.text for message in messages)
    notes: list[str] = []
    most = None
    if body.longest is not None:
        most = min(body.longest, service.limits.answer_tokens, service.asking.longest_answer)
        if most < body.longest:
            notes.append(f"max_tokens was reduced from {body.longest} to {most}, the most that an answer may have")
    if len(messages) > 1 and not service.asking.reads_conversations:
        notes.append("this model reads only the last message; the messages before it had no influence")
    drawn = [name for name in _NOT_DRAWN if body.temperature and (body.model_extra or {}).get(name)]
    if drawn:
        notes.append(f"{' and '.join(drawn)} had no influence; use top_p, top_k or min_p")
    allowed = None
    if bank is not None and body.filters:
        allowed = await service.reads.run(partial(bank.allowed, body.filters), request)
    question = ServedQuestion(
        service.checked_question(messages[-1].text) if messages else "",
        bank,
        before=tuple(messages[:-1]),
        use_memory=body.memory,
        use_retriever=_uses_retriever(body.retriever, bank),
        k=body.k,
        memory_weight=body.memory_weight,
        allowed=allowed,
        as_of=body.as_of,
        sampling=_sampling(service, body),
        max_new_tokens=most,
        sources=body.sources,
        min_confidence=body.min_confidence,
    )
    return question, notes


def _sampling(service: Service, body: AnswerRequest) -> Sampling:
    """How the answer is decoded. Raises APIError: 400 for a bias on a token that the LM does not have."""
    lm = service.model.base_lm
    size = len(lm.model.get_input_embeddings().weight)
    bias = [(int(token), value) for token, value in body.logit_bias.items()]
    unknown = [token for token, _ in bias if token >= size]
    if unknown:
        raise APIError(400, f"token {unknown[0]} is none of the LM's {size:,}; leave it out", param="logit_bias")
    if body.ignore_eos:
        bias += [(token, _NEVER) for token in lm.end_tokens]
    return Sampling(
        body.temperature,
        body.top_p,
        None if body.seed is None else body.seed % _SEEDS,
        tuple(filter(None, [body.stop] if isinstance(body.stop, str) else body.stop)),
        max(body.top_k, 0),
        body.min_p,
        body.presence_penalty,
        body.frequency_penalty,
        tuple(bias),
        body.alternatives,
    )


def _bank(service: Service, model: str, bank: str | None, who: Principal) -> ServedBank | None:
    """The bank that the model's name or the field `bank` names; None for the model alone."""
    name, colon, named = model.partition(":")
    if name != service.model_name:
        raise no_such_model(model)
    if colon and bank is not None and bank != named:
        raise APIError(
            400, f"model names the bank {named!r:.80}, and bank is {bank!r:.80}; leave one out", param="bank"
        )
    chosen = named if colon else bank
    if chosen is None:
        return None
    try:
        return service.bank(chosen, who)
    except APIError as error:
        raise (no_such_model(model) if colon and error.status == 404 else error) from None


def _uses_retriever(wanted: str | bool | None, bank: ServedBank | None) -> bool:
    if wanted in (False, "none"):
        return False
    if isinstance(wanted, str) and (bank is None or wanted != bank.retriever):
        has = "no bank" if bank is None else f"the retriever {bank.retriever}"
        raise APIError(400, f"retriever is {wanted!r:.40}, and this model has {has}; leave it out", param="retriever")
    return True


def _model(service: Service, name: str) -> dict[str, Any]:
    """A model as clients see it. `confidence` names the ways of answering for which `min_confidence` can be given."""
    model: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "mac_rag"}
    if name == EMBEDDING_MODEL:
        return model
    fit = service.model.calibration
    return {**model, "confidence": sorted(fit.modes) if fit and fit.fingerprint == service.model.fingerprint else []}


def _written(vector: Any, encoding: str) -> Any:
    values = np.asarray(vector, dtype="<f4")
    return base64.b64encode(values.tobytes()).decode() if encoding == "base64" else values.tolist()
