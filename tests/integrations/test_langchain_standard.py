"""LangChain's own suites for chat models and retrievers.

Tests of tools, structured output, images and the like skip themselves, because ChatMAC declares none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from mac_rag import MACEngine
from mac_rag.errors import InstructionError
from mac_rag.integrations.langchain import ChatMAC, MACRetriever


@pytest.fixture
def benchmark() -> Callable[[Callable[[], None]], None]:
    """Runs what the suite measures elsewhere."""
    return lambda run: run()


@pytest.fixture
def snapshot() -> None:
    """Nothing of ours is serialized."""


@pytest.fixture
def vcr() -> None:
    """Nothing of ours is recorded."""


class Declared:
    """What ChatMAC can do, for the suites."""

    engine: MACEngine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatMAC

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def supports_model_override(self) -> bool:
        return False


class TestUnits(Declared, ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _take(self, mac_tiny: MACEngine) -> None:
        self.engine = mac_tiny


class TestAnswersOfMacTiny(Declared, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _take(self, mac_tiny: MACEngine) -> None:
        self.engine = mac_tiny

    @pytest.mark.xfail(
        reason="mac-tiny reads questions, and refuses system messages, because it would ignore them",
        raises=InstructionError,
        strict=True,
    )
    def test_double_messages_conversation(self, model: BaseChatModel) -> None:
        super().test_double_messages_conversation(model)


class TestAnswersOfAChatCheckpoint(Declared, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _take(self, chatting: MACEngine) -> None:
        self.engine = chatting


class TestRetriever(RetrieversIntegrationTests):
    engine: MACEngine

    @pytest.fixture(autouse=True)
    def _take(self, mac_tiny: MACEngine) -> None:
        self.engine = mac_tiny

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return MACRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def retriever_query_example(self) -> str:
        return "Where did the storm hit?"


def test_nothing_is_declared_that_the_suites_would_have_to_try(mac_tiny: MACEngine) -> None:
    """What is skipped is what LangChain's own interface says to be missing."""
    llm = ChatMAC(engine=mac_tiny)
    with pytest.raises(NotImplementedError):
        llm.bind_tools([])
    with pytest.raises(NotImplementedError):
        llm.with_structured_output({"title": "Answer", "type": "object", "properties": {}})
    assert llm.profile is not None
    assert llm.profile["tool_calling"] is llm.profile["structured_output"] is False
