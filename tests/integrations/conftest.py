"""Real LlamaIndex objects around the tiny model; and async tests, as those of LangChain's suites are."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index_instrumentation import root_dispatcher

from mac_rag.bank import MemoryBank
from mac_rag.data.types import Document as MACDocument
from mac_rag.engine import MACEngine
from mac_rag.integrations.llama_index import MACLLM
from mac_rag.model import MACModel
from tests.helpers import copy_of
from tests.integrations.helpers import FACTS, NEWS, EventLog, HashEmbedding, RecordingEngine, forget_warnings


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    """Each test sees the warnings that a process gives once."""
    forget_warnings()


@pytest.fixture
def engine(tiny_model: MACModel) -> RecordingEngine:
    """An engine with an empty bank."""
    return RecordingEngine(tiny_model)


@pytest.fixture
def other_model(tiny_model: MACModel) -> MACModel:
    """A model that cannot share a bank with the tiny one."""
    model = copy_of(tiny_model)
    with torch.no_grad():
        next(iter(model.aggregation.parameters())).add_(1.0)
    return model


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return [Document(id_=name, text=text) for name, text in FACTS.items()]


@pytest.fixture(scope="session")
def index(documents: list[Document]) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(documents, embed_model=HashEmbedding())


@pytest.fixture
def index_of() -> Callable[..., VectorStoreIndex]:
    """Builds an index over whole texts."""
    return lambda *texts: VectorStoreIndex.from_documents(
        [Document(text=text) for text in texts], embed_model=HashEmbedding()
    )


@pytest.fixture
def event_log() -> Iterator[EventLog]:
    log = EventLog(events=[])
    root_dispatcher.add_event_handler(log)
    yield log
    root_dispatcher.event_handlers.remove(log)


@pytest.fixture
def remembering(engine: RecordingEngine) -> RecordingEngine:
    """An engine that remembers the facts."""
    engine.adapt(MACDocument(name, text) for name, text in FACTS.items())
    return engine


@pytest.fixture
def llm(remembering: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> MACLLM:
    llm = MACLLM(engine=remembering)
    monkeypatch.setattr(Settings, "_llm", llm)  # some components resolve it, whatever they are given
    monkeypatch.setattr(Settings, "_embed_model", HashEmbedding())
    return llm


@pytest.fixture(scope="session")
def mac_tiny() -> MACEngine:
    """An engine that remembers the news, and that no test changes."""
    return _informed(MACModel.from_pretrained("mac-tiny", device="cpu"))


@pytest.fixture(scope="session")
def chatting(chat_checkpoint: Path) -> MACEngine:
    """The same around an instruct LM with random weights."""
    return _informed(MACModel.from_pretrained(chat_checkpoint, device="cpu"))


def _informed(model: MACModel) -> MACEngine:
    engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True))
    engine.adapt(MACDocument(name, text) for name, text in NEWS.items())
    return engine


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an async test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
