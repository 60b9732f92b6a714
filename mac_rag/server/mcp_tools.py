"""Tools for agents, by the Model Context Protocol: remember, ask, forget, list and search."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import wraps
from importlib.metadata import version
from typing import Any, ParamSpec

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

from mac_rag.data.provenance import Member
from mac_rag.data.types import AdaptReport, Document
from mac_rag.errors import MACError
from mac_rag.server.api_errors import APIError, error_of
from mac_rag.server.asking import ServedQuestion
from mac_rag.server.banks import found
from mac_rag.server.keys import ANYONE, Principal, Scope
from mac_rag.server.service import Service

_Arguments = ParamSpec("_Arguments")
_INSTRUCTIONS = (
    "A long-term memory. `remember` keeps a text in a bank, `ask` answers a question from what a bank remembers, "
    "`search` finds the texts themselves, `read` reads on in a long one, `list` shows banks and documents, `forget` "
    "deletes a document."
)
_SOURCES = 5
_CHARACTERS = 30_000  # of a result, which an agent's LM must read
_SENTENCE = 1_000  # characters of a source's sentence, which may be a text without a full stop


def make_tools(service: Service) -> MCPServer[Any]:
    """Makes the tools of a server. Over HTTP, each call has the rights of its key; on standard input, all rights."""
    server: MCPServer[Any] = MCPServer(
        "mac_rag", instructions=_INSTRUCTIONS, version=version("mac-rag"), log_level="WARNING"
    )

    @server.tool()
    @_with_tool_errors
    async def remember(context: Context[Any, Any], text: str, bank: str, id: str | None = None) -> dict[str, Any]:
        """Remember a text in a bank. A known id replaces its text; without an id, one is made from the text."""
        who = _principal(context, "write")
        name = id or f"note-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
        document, place = Document(name, text), service.bank(bank, who)
        if (fault := service.limits.fault_of(document)) is not None:
            raise APIError(400, f"the document: {fault}")

        def work(_: object) -> AdaptReport:
            Member.of(document)
            return place.put([document])

        report = await service.writes.run(work)
        service.audit.note(who.name, "documents.put", bank, added=report.added, updated=report.updated)
        return {"id": name, "documents": len(place)}

    @server.tool()
    @_with_tool_errors
    async def ask(context: Context[Any, Any], question: str, bank: str, as_of: str | None = None) -> dict[str, Any]:
        """Answer a question from what a bank remembers, with the documents and sentences that the answer rests on."""
        place = service.bank(bank, _principal(context, "read"))
        one = ServedQuestion(service.checked_question(question), place, as_of=as_of, sources=_SOURCES)
        [reply] = await service.questions.run(lambda gone: service.asking.answer([one], gone))
        sources = [
            {"id": source.document_id, "attention": source.share, "sentence": (source.sentence or "")[:_SENTENCE]}
            for source in reply.sources
        ]
        return {"answer": reply.text, "sources": sources, "retrieved": reply.retrieved}

    @server.tool()
    @_with_tool_errors
    async def forget(context: Context[Any, Any], id: str, bank: str) -> dict[str, Any]:
        """Delete a document from a bank, for good."""
        who = _principal(context, "write")
        return {"forgotten": await service.writes.run(lambda _: service.forget(bank, [id], who))}

    @server.tool(name="list")
    @_with_tool_errors
    async def list_all(context: Context[Any, Any], bank: str | None = None, after: str | None = None) -> dict[str, Any]:
        """List the banks, or the documents of a bank, a hundred at a time; `after`: last id of the page before."""
        who = _principal(context, "read")
        if bank is None:
            return {"banks": [{"name": one.name, "documents": len(one)} for one in service.banks(who)]}
        place = service.bank(bank, who)
        page, more = await service.reads.run(lambda _: place.listing(after, 100, _CHARACTERS))
        return {"documents": page, "has_more": more}

    @server.tool()
    @_with_tool_errors
    async def search(context: Context[Any, Any], query: str, bank: str, k: int = 5) -> dict[str, Any]:
        """Find the texts in a bank that match a query best."""
        place = service.bank(bank, _principal(context, "read"))
        text, most = service.checked_question(query), max(1, min(k, 100))
        hits = await service.questions.run(lambda _: service.asking.search(place, text, most, None, None))
        return {"hits": found(hits, _CHARACTERS)}

    @server.tool()
    @_with_tool_errors
    async def read(context: Context[Any, Any], id: str, bank: str, start: int = 0) -> dict[str, Any]:
        """Read the text of a document, in parts if it is long; `start`: the `next` of the part before."""
        place = service.bank(bank, _principal(context, "read"))
        text = (await service.reads.run(lambda _: place.document(id)))["text"]
        if text is None:
            raise APIError(404, "this bank keeps no texts")
        first = max(0, start)
        end = first + _CHARACTERS
        return {"id": id, "text": text[first:end], "next": end if end < len(text) else None}

    return server


def run_on_standard_input(service: Service) -> None:
    """Serves one agent on standard input and output, until it closes them."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    try:
        anyio.run(_on_standard_input, make_tools(service))
    finally:
        service.close()


async def _on_standard_input(server: MCPServer[Any]) -> None:
    """Serves standard input. What the SDK cannot read it would never answer, so it gets its error here."""
    write: Any

    async def readable() -> AsyncIterator[str]:
        async for line in anyio.wrap_file(sys.stdin.buffer):
            try:
                jsonrpc_message_adapter.validate_json(line, by_name=False)
                yield line.decode()
            except ValueError as error:
                fault = ErrorData(code=PARSE_ERROR, message=f"this message cannot be read: {_first_of(error)}")
                await write.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=_id_of(line), error=fault)))

    lines: Any = readable()
    async with stdio_server(stdin=lines) as (read, write):
        inner = server._lowlevel_server
        await inner.run(read, write, inner.create_initialization_options())


def _first_of(error: ValueError) -> str:
    return error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)


def _id_of(line: bytes) -> Any:
    """The id of a message; None if it has none."""
    with suppress(ValueError, RecursionError):
        message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("id"), str | int):
            return message["id"]
    return None


def _principal(context: Context[Any, Any], scope: Scope) -> Principal:
    """The holder of the HTTP request's key, or `ANYONE` on standard input. Raises APIError 403 without this scope."""
    request = context.request_context.request
    who: Principal = ANYONE if request is None else request.state.principal
    if not who.may(scope):
        raise APIError(403, f"this needs a key with the scope {scope}, and this one has {who.scope}")
    return who


def _with_tool_errors(
    tool: Callable[_Arguments, Awaitable[dict[str, Any]]],
) -> Callable[_Arguments, Awaitable[dict[str, Any]]]:
    """The tool, which raises its errors as `ToolError` with the messages that HTTP responses have."""

    @wraps(tool)
    async def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> dict[str, Any]:
        try:
            return await tool(*args, **kwargs)
        except (APIError, MACError) as error:
            raise ToolError(error_of(error).message) from None

    return called
