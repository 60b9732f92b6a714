"""Bodies of requests: JSON read within bounds, and the fields of each route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from mac_rag.server.api_errors import APIError
from mac_rag.server.keys import Principal, Scope
from mac_rag.untrusted_files import METADATA_DEPTH, ROW_CONTAINERS, MalformedError, parse_json

Finite = Annotated[float, Field(allow_inf_nan=False)]


class StrictRequest(Request):
    """A request whose JSON is read within bounds of nesting and digits, with each name once and without NaN."""

    async def json(self) -> Any:
        try:
            return parse_json(await self.body(), depth=METADATA_DEPTH + 4, containers=ROW_CONTAINERS)
        except MalformedError as error:
            raise HTTPException(400, f"the body is not JSON that this server takes: {error}") from None


class StrictRoute(APIRoute):
    """A route that reads JSON as `StrictRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


class Body(BaseModel):
    """A body in which an unknown field is an error, because it would have no effect."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    # Clients send the message of an answer back as it came, including its empty fields.
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
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
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class AnswerRequest(Body):
    """The common fields of chat completions and completions. OpenAI's come first; `bank` and later ones are our own."""

    model: str = Field(max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    n: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    # These have no effect on answers.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    # Of these, only a value that changes nothing is allowed.
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    logit_bias: dict[str, Any] | None = None

    bank: str | None = Field(None, max_length=256, description="Bank to ask, if `model` does not name it.")
    filters: dict[str, Any] | None = Field(
        None, description="Metadata that documents must have: key -> value, or a list of values."
    )
    as_of: str | None = Field(None, max_length=100, description="Answer as of this date.")
    k: Annotated[int, Field(ge=1, le=100)] | None = Field(None, description="Documents to retrieve.")
    retriever: str | bool | None = Field(None, description="false or none to retrieve nothing.")
    memory: bool = Field(True, description="false to answer without the bank's memory.")
    memory_weight: Annotated[Finite, Field(gt=0, le=1)] | None = Field(
        None, description="lambda: weight of the LM with memory if documents were retrieved."
    )
    min_confidence: Finite | None = Field(
        None, description='From 0 to 1: say "I don\'t know" in place of an answer that is less likely to be right.'
    )
    sources: Annotated[int, Field(ge=0, le=100)] = Field(5, description="Documents to name as sources, at most.")


class ChatRequest(AnswerRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=256)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(AnswerRequest):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=32)]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class EmbeddingRequest(Body):
    model: str = Field(max_length=256)
    input: str | Annotated[list[str], Field(min_length=1, max_length=256)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class NewBank(Body):
    name: str = Field(max_length=256)
    retriever: str = "bm25"
    keep_texts: bool | None = None


class NewDocument(Body):
    id: str
    text: str
    metadata: dict[str, Any] = Field(default_factory=dict)


class NewDocuments(Body):
    documents: Annotated[list[NewDocument], Field(min_length=1)]
    wait: bool = Field(True, description="false to get a job at once instead of waiting.")


class DocumentIds(Body):
    ids: Annotated[list[str], Field(min_length=1)]


class SearchRequest(Body):
    query: str
    k: Annotated[int, Field(ge=1, le=100)] = 5
    filters: dict[str, Any] | None = None
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
