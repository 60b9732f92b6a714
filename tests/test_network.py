"""The everyday ways of use open no connection and no port."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from llama_index.core import SummaryIndex
from llama_index.core.schema import TextNode
from typer.testing import CliRunner

from mac_rag.cli.main import app
from mac_rag.engine import MACEngine
from mac_rag.integrations.langchain import ChatMAC, to_documents
from mac_rag.integrations.llama_index import MACLLM, MemoryWriter

TEXT = "Ada Voss was appointed head of the Orsena museum."


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to reach a network or to open a port, by what was called; each fails."""
    calls: list[str] = []

    def refuse(name: str) -> Any:
        def call(*arguments: Any, **_: Any) -> Any:
            calls.append(f"{name}{arguments[-1:]}")
            raise OSError("this test has no network")

        return call

    for name in ("connect", "connect_ex", "bind", "listen", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse(name))
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse(name))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return calls


def test_the_watch_notices(asked: list[str]) -> None:
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 1))
    with socket.socket() as one, pytest.raises(OSError, match="no network"):
        one.bind(("127.0.0.1", 0))
    assert len(asked) == 2


def test_the_command_line(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "may.txt").write_text(TEXT)
    place = ["--bank", str(tmp_path / "bank"), "--retriever", "bm25"]
    for command in (
        ["adapt", str(tmp_path / "may.txt"), "--model", "mac-tiny", *place],
        ["ask", "Who was appointed?", "--model", "mac-tiny", *place],
        ["bank", "info", "--bank", str(tmp_path / "bank")],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    assert asked == []


def test_engine_and_llama_index(asked: list[str]) -> None:
    engine = MACEngine("mac-tiny")
    nodes = MemoryWriter(engine=engine)([TextNode(text=TEXT)])
    assert len(nodes) == len(engine.bank) == 1
    index = SummaryIndex(nodes)
    assert index.as_query_engine(llm=MACLLM(engine=engine)).query("Who was appointed?").response
    assert asked == []


def test_langchain(asked: list[str]) -> None:
    llm = ChatMAC(model="mac-tiny")
    llm.engine.adapt(to_documents([Document(TEXT)]))
    assert llm.invoke("Who was appointed?").content
    assert llm.get_num_tokens("Who was appointed?") > 0  # LangChain's own counts by a tokenizer that it fetches
    assert asked == []
