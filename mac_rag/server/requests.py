"""Bodies of requests: JSON read within bounds, outside of the event loop, and the fields of each route."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias

import anyio
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from mac_rag.server.api_errors import APIError
from mac_rag.server.keys import Principal, Scope
from mac_rag.untrusted_files import METADATA_DEPTH, ROW_CONTAINERS, MalformedError, parse_json

Finite = Annotated[float, Field(allow_inf_nan=False)]


# A JSON string, complete or not, or a comma outside of strings.
_STRING_OR_COMMA = re.compile(r'"(?:[^"\\]++|\\.)*+"?|,', re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # perhaps half of a surrogate pair


class StrictRequest(Request):
    """A request whose JSON is read within bounds of size, nesting and digits, with each name once and without NaN.

    Attributes:
        most: most bytes of the body; None for those that the server takes of any request.
        most_values: most values in JSON, about.
    """

    most: int | None = 1 << 20
    most_values = 20_000

    async def stream(self) -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in super().stream():
            size += len(piece)
            if self.most is not None and size > self.most:
                raise HTTPException(413, f"the body has more than {self.most:,} bytes; send less")
            yield piece

    async def json(self) -> Any:
        return await anyio.to_thread.run_sync(self._parsed, await self.body())

    def _parsed(self, body: bytes) -> Any:
        try:
            if body.count(b",") > self.most_values:
                commas = (match for match in _STRING_OR_COMMA.finditer(body.decode()) if match[0] == ",")
                if any(number == self.most_values for number, _ in enumerate(commas, 1)):
                    raise MalformedError(f"it has more than {self.most_values:,} values")
            content = parse_json(body, depth=METADATA_DEPTH + 4, containers=min(self.most_values, ROW_CONTAINERS))
            if _HALF.search(body):
                json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = (
                f"\\u{ord(error.object[error.start]):04x} is half of a surrogate pair, which is no character; remove it"
            )
            raise HTTPException(400, f"the body is not JSON that this server takes: {half}") from None
        except (MalformedError, UnicodeDecodeError) as error:
            raise HTTPException(400, f"the body is not JSON that this server takes: {error}") from None
        return content


class LongRequest(StrictRequest):
    """A request with documents."""

    most = None
    most_values = 200_000


class StrictRoute(APIRoute):
    """A route that reads JSON as `StrictRequest` does."""

    request: type[StrictRequest] = StrictRequest

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(self.request(request.scope, request.receive))

        return strict


class LongRoute(StrictRoute):
    """A route that takes documents."""

    request = LongRequest


class Body(BaseModel):
    """A body in which an unknown field is an error, because it would have no effect. null says nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_null(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


def _bounded(filters: dict[str, Any]) -> dict[str, Any]:
    """Filters of few values, because each document is compared with all of them."""
    waiting: list[tuple[Any, int]] = [(filters, 1)]
    for count in range(1, _MOST_VALUES + 1):
        if not waiting:
            return filters
        value, depth = waiting.pop()
        if depth > _DEEPEST_FILTER:
            raise ValueError(f"they are nested more than {_DEEPEST_FILTER} deep; give a list of values for each key")
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        if len(items) + count > _MOST_VALUES:
            break
        waiting += [(item, depth + 1) for item in items]
    raise ValueError(f"they have more than {_MOST_VALUES:,} values; give fewer")


# Most values in filters, lists and objects included, and how deep they may be nested.
_MOST_VALUES, _DEEPEST_FILTER = 1_000, 8
Filters = Annotated[dict[str, Any], AfterValidator(_bounded)]


class OpenBody(Body):
    """A body of OpenAI's API, which grows by the month: a field that is unknown here has no effect."""

    model_config = ConfigDict(extra="allow", strict=True)


class TextPart(OpenBody):
    type: Literal["text", "input_text", "output_text"]
    text: str


class ChatMessage(OpenBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message with the role {self.role} must have a content")
        return self

    @property
    def text(self) -> str:
        """Its text."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)


class StreamOptions(OpenBody):
    include_usage: bool = False


Stop = Annotated[str, Field(max_length=256)]
# Fields of this and other servers whose effect a client would miss: name -> values without an effect. Other fields that
# are unknown here only change how an answer is made, such as `mirostat`, or what is kept of it, such as `store`.
_MISSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "logprobs": (False, 0),
    "prompt_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "grammar": ("",),
    "json_schema": ({},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
}


Bias = Annotated[Finite, Field(ge=-100, le=100)]
LogitBias = Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias], Field(max_length=1_000)]
Choices = Annotated[int, Field(ge=1, le=8)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


class AnswerRequest(OpenBody):
    """The common fields of all APIs that answer. OpenAI's come first; `bank` and later ones are our own."""

    model: str = Field(max_length=256)
    stream: bool = False
    temperature: Annotated[Finite, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] = ""
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    ignore_eos: bool = False

    bank: str | None = Field(None, max_length=256, description="Bank to ask, if `model` does not name it.")
    filters: Filters | None = Field(
        None, description="Metadata that documents must have: key -> value, or a list of values."
    )
    as_of: str | None = Field(None, max_length=100, description="Answer as of this date.")
    k: Annotated[int, Field(ge=1, le=20)] | None = Field(None, description="Documents to retrieve.")
    retriever: str | bool | None = Field(None, description="false or none to retrieve nothing.")
    memory: bool = Field(True, description="false to answer without the bank's memory.")
    memory_weight: Annotated[Finite, Field(gt=0, le=1)] | None = Field(
        None, description="lambda: weight of the LM with memory if documents were retrieved."
    )
    min_confidence: Finite | None = Field(
        None, description='From 0 to 1: say "I don\'t know" in place of an answer that is less likely to be right.'
    )
    sources: Annotated[int, Field(ge=0, le=100)] = Field(5, description="Documents to name as sources, at most.")

    @model_validator(mode="after")
    def _misses_nothing(self) -> AnswerRequest:
        for name, value in (self.model_extra or {}).items():
            if name in _MISSED:
                if value not in _MISSED[name]:
                    raise PydanticCustomError(UNKNOWN, "this server has no {name}; leave it out", {"name": name})
            elif near := get_close_matches(name.lower(), _OWN, 1, 0.85):
                raise PydanticCustomError(
                    UNKNOWN, "there is no field {name}; did you mean {near}?", {"name": name, "near": near[0]}
                )
        return self

    @property
    def longest(self) -> int | None:
        """Most tokens of the answer; None if the request does not say."""
        raise NotImplementedError

    @property
    def alternatives(self) -> int | None:
        """Most alternatives to each token that the response names, with log-probabilities; None to name none."""
        raise NotImplementedError


UNKNOWN = "unknown_field"
# Own fields; a client that misspells one of them would miss its effect.
_OWN = ("bank", "filters", "as_of", "retriever", "memory", "memory_weight", "min_confidence", "sources")
Tokens = Annotated[int, Field(ge=1)]


class ChatRequest(AnswerRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=256)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    n: Choices = 1
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _names_what_it_asks_for(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(UNKNOWN, "it needs logprobs: true", {"name": "top_logprobs"})
        return self


class CompletionRequest(AnswerRequest):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=32)]
    max_tokens: Tokens | None = None
    stream_options: StreamOptions = StreamOptions()
    n: Choices = 1
    logprobs: TopLogprobs | None = None

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class ResponsesMessage(ChatMessage):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class TextFormat(OpenBody):
    type: Literal["text"]


class ResponsesText(OpenBody):
    format: TextFormat | None = None


class ResponsesRequest(AnswerRequest):
    """OpenAI's Responses, without tools, and without conversations that the server keeps."""

    input: str | Annotated[list[ResponsesMessage], Field(min_length=1, max_length=256)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    text: ResponsesText | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    top_logprobs: TopLogprobs = 0
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)

    @property
    def longest(self) -> int | None:
        return self.max_output_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.include or self.top_logprobs else None


class EmbeddingRequest(OpenBody):
    model: str = Field(max_length=256)
    input: str | Annotated[list[str], Field(min_length=1, max_length=256)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class NewBank(Body):
    name: str = Field(max_length=256)
    retriever: Literal["none", "bm25", "minilm", "hybrid"] = "bm25"
    keep_texts: bool = True


class NewName(Body):
    name: str = Field(max_length=256)


class NewDocument(Body):
    id: str
    text: str
    metadata: dict[str, Any] = Field(default_factory=dict)


class NewDocuments(Body):
    documents: Annotated[list[NewDocument], Field(min_length=1, max_length=1_000)]
    wait: bool = Field(True, description="false to get a job at once instead of waiting.")


class DocumentIds(Body):
    ids: Annotated[list[str], Field(min_length=1, max_length=1_000)]


class SearchRequest(Body):
    query: str
    k: Annotated[int, Field(ge=1, le=100)] = 5
    filters: Filters | None = None
    as_of: str | None = Field(None, max_length=100)


# The scope that a route needs: `Reader`, `Writer` or `Admin` in its signature.


def needs(scope: Scope) -> Callable[[Request], Principal]:
    """A FastAPI dependency that returns the request's principal, and refuses one without this scope."""

    def principal(request: Request) -> Principal:
        who: Principal | None = request.state.principal
        if who is None:
            raise APIError(401, "the key is missing; send Authorization: Bearer KEY", code="invalid_api_key")
        if not who.may(scope):
            raise APIError(403, f"this needs a key with the scope {scope}, and this one has {who.scope}")
        return who

    return principal


Reader: TypeAlias = Annotated[Principal, Depends(needs("read"))]
Writer: TypeAlias = Annotated[Principal, Depends(needs("write"))]
Admin: TypeAlias = Annotated[Principal, Depends(needs("admin"))]
