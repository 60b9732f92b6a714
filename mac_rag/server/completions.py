"""`/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/v1/embeddings`, compatible with OpenAI's clients."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from secrets import token_hex
from typing import Any

import anyio
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mac_rag.errors import MACError
from mac_rag.lm.decoding import Sampling
from mac_rag.server.api_errors import APIError, error_of, no_such_model, unexpected
from mac_rag.server.asking import Reply, ServedQuestion
from mac_rag.server.catalog import ServedBank
from mac_rag.server.keys import Principal
from mac_rag.server.requests import AnswerRequest, ChatRequest, CompletionRequest, EmbeddingRequest, Reader, StrictRoute
from mac_rag.server.service import EMBEDDING_MODEL, Service
from mac_rag.server.structured import Wanted, conversation, wanted
from mac_rag.sources import source_record

_log = logging.getLogger(__name__)
_SEEDS = 2**63


def routes(service: Service) -> APIRouter:
    """The routes of one server."""
    router = APIRouter(prefix="/v1", route_class=StrictRoute)

    @router.get("/models")
    def models(who: Reader) -> dict[str, Any]:
        """The model alone, and each bank as `MODEL:BANK`."""
        names = [service.model_name, *(f"{service.model_name}:{bank.name}" for bank in service.banks(who))]
        return {"object": "list", "data": [_model(name) for name in [*names, EMBEDDING_MODEL]]}

    @router.get("/models/{name:path}")
    def model(name: str, who: Reader) -> dict[str, Any]:
        """One model."""
        if name != EMBEDDING_MODEL:
            _bank(service, name, None, who)
        return _model(name)

    @router.post("/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request, who: Reader) -> Response:
        """Answers the last message."""
        _check_chat(body)
        asked = wanted(body, is_chat=service.asking.reads_conversations)
        messages = conversation(body.messages, asked)
        if messages[-1].role != "user":
            raise APIError(
                400,
                f"the last message has the role {messages[-1].role}; end with the user's, which is the question",
                param="messages",
            )
        most = body.max_completion_tokens or body.max_tokens
        question, notes = _question(service, body, who, messages[-1].text, most)
        question = replace(question, before=tuple(messages[:-1]))
        if len(messages) > 1 and not service.asking.reads_conversations:
            notes.append("this model reads only the last message; the messages before it had no influence")
        shape = _Chat(body.model, notes, asked)
        if body.stream:
            return await _streamed(service, [question], shape, _wants_usage(body))
        return await _answered(service, request, [question], shape)

    @router.post("/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request, who: Reader) -> Response:
        """Answers one prompt or several."""
        _check_completion(body)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        question, notes = _question(service, body, who, "", body.max_tokens)
        questions = [replace(question, text=service.checked_question(text)) for text in texts]
        shape = _Completion(body.model, notes)
        if body.stream:
            return await _streamed(service, questions, shape, _wants_usage(body))
        return await _answered(service, request, questions, shape)

    @router.post("/embeddings")
    async def embed(body: EmbeddingRequest, request: Request, _: Reader) -> dict[str, Any]:
        """Vectors of texts, by the sentence encoder."""
        if body.model != EMBEDDING_MODEL:
            raise no_such_model(body.model)
        texts = [
            service.checked_question(text) for text in ([body.input] if isinstance(body.input, str) else body.input)
        ]

        def work(_: Callable[[], bool]) -> Any:
            encoder = service.encoder()
            if body.dimensions not in (None, encoder.width):
                raise APIError(
                    400,
                    f"dimensions is {body.dimensions}, and vectors have {encoder.width}; leave it out",
                    param="dimensions",
                )
            with service.metrics.part("embed"):
                return encoder.questions(texts)

        vectors = await service.reads.run(work, request)
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        tokens = sum(len(service.model.base_lm.prompts.texts.ids(text)) for text in texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": body.model, "data": data, "usage": usage}

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

    def piece_choice(self, index: int, text: str | None, first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, replies: list[Reply]) -> dict[str, Any]:
        choices = [
            {"logprobs": None, "finish_reason": _finish(reply), **self.choice(index, reply)}
            for index, reply in enumerate(replies)
        ]
        own = {"sources": _sources(replies[0]), **self._own(replies[0])}
        if len(replies) > 1:
            for choice, reply in zip(choices, replies):
                choice["sources"] = _sources(reply)
                choice["confidence"] = reply.confidence
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage_of(replies), **own}

    def _own(self, reply: Reply) -> dict[str, Any]:
        """The fields that this server adds to OpenAI's."""
        own: dict[str, Any] = {"confidence": reply.confidence, "guess": reply.guess}
        own |= {"retrieved": reply.retrieved, "truncated": reply.truncated}
        return {**own, "notes": self._notes}

    def piece(self, index: int, text: str, first: bool) -> dict[str, Any]:
        choice = {**self.piece_choice(index, text, first), "logprobs": None, "finish_reason": None}
        return {**self._head, "object": self.piece_kind, "choices": [{"index": index, **choice}]}

    def end(self, index: int, reply: Reply) -> dict[str, Any]:
        choice = {**self.piece_choice(index, None, False), "logprobs": None, "finish_reason": _finish(reply)}
        own = {"sources": _sources(reply), **self._own(reply)}
        return {**self._head, "object": self.piece_kind, "choices": [{"index": index, **choice}], **own}

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

    def piece_choice(self, index: int, text: str | None, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {} if text is None else {"content": text}
        return {"delta": {"role": "assistant", **delta} if first else delta}


class _Completion(_Shape):
    prefix = "cmpl"
    kind = piece_kind = "text_completion"

    def choice(self, index: int, reply: Reply) -> dict[str, Any]:
        return {"index": index, "text": reply.text}

    def piece_choice(self, index: int, text: str | None, first: bool) -> dict[str, Any]:
        return {"text": text or ""}


def usage_of(replies: list[Reply]) -> dict[str, int]:
    """Numbers of tokens of all prompts and answers."""
    prompt = sum(reply.prompt_tokens for reply in replies)
    completion = sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _sources(reply: Reply) -> list[dict[str, Any]]:
    said = reply.text if reply.guess is None else reply.guess
    return [source_record(source, said) for source in reply.sources]


def _finish(reply: Reply) -> str:
    return "length" if reply.is_cut else "stop"


async def _answered(service: Service, request: Request, questions: list[ServedQuestion], shape: _Shape) -> Response:
    """The answers to all questions, in one response."""
    replies = await service.questions.run(
        lambda gone: service.asking.answer(questions, gone), request, units=len(questions)
    )
    return JSONResponse(shape.whole(replies))


async def _streamed(service: Service, questions: list[ServedQuestion], shape: _Shape, with_usage: bool) -> Response:
    """The answers as server-sent events, one after the other. An error before the first piece is a plain response."""
    streams = [service.questions.stream(partial(service.asking.stream, question)) for question in questions]
    first = await anext(streams[0])

    def chunk(content: dict[str, Any]) -> bytes:
        return _event({**content, "usage": None} if with_usage else content)

    async def events() -> AsyncIterator[bytes]:
        replies: list[Reply] = []
        try:
            for index, stream in enumerate(streams):
                begun = False
                async for item in _chain(first, stream) if index == 0 else stream:
                    if isinstance(item, Reply):
                        if not begun:
                            yield chunk(shape.piece(index, "", True))
                        replies.append(item)
                        yield chunk(shape.end(index, item))
                    else:
                        yield chunk(shape.piece(index, item, not begun))
                        begun = True
            if with_usage:
                yield _event(shape.usage(replies))
        except APIError as error:
            yield _event(error.body)
        except MACError as error:
            yield _event(error_of(error).body)
        except Exception:
            _log.exception("a stream failed")
            yield _event(unexpected().body)
        finally:
            # Shielded, because a task that is cancelled when the client has gone can wait for nothing.
            with anyio.CancelScope(shield=True):
                for stream in streams:
                    await stream.aclose()
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _chain(first: str | Reply, rest: AsyncIterator[str | Reply]) -> AsyncIterator[str | Reply]:
    yield first
    async for item in rest:
        yield item


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def _question(
    service: Service, body: AnswerRequest, who: Principal, text: str, max_tokens: int | None
) -> tuple[ServedQuestion, list[str]]:
    """The question of a request, and notes for its client."""
    bank = _bank(service, body.model, body.bank, who)
    if bank is None and (body.filters or body.as_of):
        raise APIError(400, "filters and as_of need a bank; name one: model MODEL:BANK", param="model")
    if bank is None and body.min_confidence is not None:
        raise APIError(400, "min_confidence needs a bank; name one: model MODEL:BANK", param="min_confidence")
    notes: list[str] = []
    most = None
    if max_tokens is not None:
        most = min(max_tokens, service.limits.answer_tokens, service.asking.longest_answer)
        if most < max_tokens:
            notes.append(f"max_tokens was reduced from {max_tokens} to {most}, the most that an answer may have")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    sampling = Sampling(
        body.temperature or 0.0,
        1.0 if body.top_p is None else body.top_p,
        None if body.seed is None else body.seed % _SEEDS,
        tuple(stop),
    )
    question = ServedQuestion(
        service.checked_question(text),
        bank,
        use_memory=body.memory,
        use_retriever=_uses_retriever(body.retriever, bank),
        k=body.k,
        memory_weight=body.memory_weight,
        allowed=None if bank is None else bank.allowed(body.filters),
        as_of=body.as_of,
        sampling=sampling,
        max_new_tokens=most,
        sources=body.sources,
        min_confidence=body.min_confidence,
    )
    return question, notes


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


def _check_common(body: AnswerRequest) -> None:
    if body.n not in (None, 1):
        raise APIError(400, f"n is {body.n}, and must be 1; ask again for another answer", param="n")
    for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(body, name):
            raise APIError(400, f"{name} is not supported; leave it out", param=name)


def _check_chat(body: ChatRequest) -> None:
    _check_common(body)
    if body.logprobs or body.top_logprobs:
        raise APIError(400, "logprobs are not supported by this model; leave them out", param="logprobs")


def _check_completion(body: CompletionRequest) -> None:
    _check_common(body)
    if body.logprobs is not None:
        raise APIError(400, "logprobs are not supported by this model; leave them out", param="logprobs")
    if body.echo or body.suffix or body.best_of not in (None, 1):
        raise APIError(400, "echo, suffix and best_of are not supported; leave them out", param="echo")


def _wants_usage(body: AnswerRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "mac_rag"}


def _written(vector: Any, encoding: str) -> Any:
    values = np.asarray(vector, dtype="<f4")
    return base64.b64encode(values.tobytes()).decode() if encoding == "base64" else values.tolist()
