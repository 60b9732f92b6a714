"""The tools of agents, with the official SDK's client."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from mac_rag.model import MACModel
from mac_rag.server.mcp_tools import _on_standard_input, make_tools
from tests.server.conftest import BRIDGE, PRESS, QUESTION
from tests.server.helpers import Running, make, serving


def told(result: Any) -> Any:
    assert not result.is_error, result.content
    return json.loads(result.content[0].text)


def over_http(running: Running, work: Callable[[Client], Awaitable[None]], key: str = "") -> None:
    """Uses a server with a key."""
    headers = {"Authorization": f"Bearer {running.tokens[key]}"} if key else {}

    async def used() -> None:
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False) as http,
            Client(streamable_http_client(f"{running.url}/mcp", http_client=http)) as client,
        ):
            await work(client)

    asyncio.run(used())


async def use(client: Client, bank: str) -> None:
    """Everything that an agent does with a bank."""
    tools = await client.list_tools()
    assert {tool.name for tool in tools.tools} == {"remember", "ask", "forget", "list", "search", "read"}
    assert client.server_info is not None
    assert client.server_info.version == version("mac-rag")
    call: Callable[..., Awaitable[Any]] = client.call_tool
    assert told(await call("remember", {"bank": bank, "text": PRESS, "id": "press"}))["documents"] == 1
    named = told(await call("remember", {"bank": bank, "text": BRIDGE}))["id"]
    assert named.startswith("note-")
    answer = told(await call("ask", {"bank": bank, "question": QUESTION}))
    assert answer["answer"] == "180"
    assert answer["sources"][0]["id"] == "press"
    assert answer["sources"][0]["sentence"] == "The company employs 180 people."
    assert told(await call("list", {}))["banks"] == [{"name": bank, "documents": 2}]
    listed = told(await call("list", {"bank": bank}))["documents"]
    assert [document["id"] for document in listed] == ["press", named]
    assert told(await call("search", {"bank": bank, "query": "bridge"}))["hits"][0]["text"] == BRIDGE
    assert told(await call("forget", {"bank": bank, "id": "press"}))["forgotten"] == ["press"]
    assert told(await call("forget", {"bank": bank, "id": "press"}))["forgotten"] == []
    for wrong in ("absent", "../agent"):
        refused = await call("ask", {"bank": wrong, "question": QUESTION})
        assert refused.is_error
        assert "there is no bank" in refused.content[0].text


def test_over_http_with_the_rights_of_a_key(mac_tiny: MACModel, tmp_path: Path) -> None:
    keys = {"root": ("admin", ["*"]), "agent": ("write", ["agent"]), "reader": ("read", ["agent"])}

    async def only_read(client: Client) -> None:
        assert told(await client.call_tool("list", {}))["banks"] == [{"name": "agent", "documents": 1}]
        for tool, arguments in (("remember", {"text": "a"}), ("forget", {"id": "a"})):
            refused: Any = await client.call_tool(tool, {"bank": "agent", **arguments})
            assert refused.is_error
            assert "scope write" in refused.content[0].text
        theirs: Any = await client.call_tool("ask", {"bank": "private", "question": QUESTION})
        assert theirs.is_error
        assert "there is no bank" in theirs.content[0].text

    with serving(tmp_path, mac_tiny, keys=keys) as running:
        for name in ("agent", "private"):
            make(running.client("root"), name)
        over_http(running, lambda client: use(client, "agent"), "agent")
        over_http(running, only_read, "reader")
    actions = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(one["key"], one["action"]) for one in actions[2:]] == [
        ("agent", "documents.put"),
        ("agent", "documents.put"),
        ("agent", "documents.delete"),
    ]


def test_results_are_bounded_and_read_on(mac_tiny: MACModel, tmp_path: Path) -> None:
    text = "".join(f"Report {number} names the bridge. " for number in range(3_000))
    documents = [{"id": f"{number}", "text": text + f"{number}", "metadata": {"a": "x" * 9_000}} for number in range(5)]

    async def use_long(client: Client) -> None:
        hits = await client.call_tool("search", {"bank": "long", "query": "bridge"})
        listed = await client.call_tool("list", {"bank": "long"})
        asked = await client.call_tool("ask", {"bank": "long", "question": QUESTION})
        for result in (hits, listed, asked):
            assert len(json.dumps(told(result))) < 40_000
        assert {hit["truncated"] for hit in told(hits)["hits"]} == {True}
        assert told(listed)["has_more"]
        read, start = "", 0
        while start is not None:
            part = told(await client.call_tool("read", {"bank": "long", "id": "3", "start": start}))
            read, start = read + part["text"], part["next"]
        assert read == text + "3"

    with serving(tmp_path, mac_tiny) as running:
        make(running.client(), "long", *documents)
        over_http(running, use_long)


HALF = (
    '{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "list", "arguments": {"bank": "\\ud83d"}}}'
)


def test_a_message_that_cannot_be_read_is_answered(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a surrogate pair, and no JSON; by standard input, where the SDK drops them, and by HTTP."""
    lines = f"{HALF}\nno json\n".encode()
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    asyncio.run(_on_standard_input(make_tools(running.service)))
    answers = {answer["id"]: answer for answer in map(json.loads, written.getvalue().splitlines())}
    assert answers[7]["error"]["code"] == answers[None]["error"]["code"] == -32700
    assert "hex escape" in answers[7]["error"]["message"]
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    answer = running.client().post("/mcp", content=HALF, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32700)


@pytest.mark.slow
def test_on_standard_input(mac_tiny: MACModel, tmp_path: Path) -> None:
    with serving(tmp_path, mac_tiny) as running:
        make(running.client(), "agent")
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-c", "from mac_rag.cli.main import main; main()", "mcp", "--data", str(tmp_path), "--model", "mac-tiny"],
        env=dict(os.environ),
    )

    async def run() -> None:
        async with Client(parameters) as client:
            await use(client, "agent")

    asyncio.run(run())
