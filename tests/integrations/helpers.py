"""Helpers of the tests with LlamaIndex and LangChain, all offline."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler

from mac_rag.engine import Answer, MACEngine
from mac_rag.integrations import framework
from mac_rag.lm.prompt import FittedPrompt

FACTS = {
    "bridge": "Anna Berg opened the bridge of Norrland in May.",
    "museum": "The museum of Sola is led by Peter Holm.",
    "river": "A ferry crosses the river Vest every hour.",
}

NEWS = {  # which mac-tiny reads
    "press": "Edgar Flara will join the board of Rainga Press. The company employs 180 people.",
    "storm": "A storm has hit Wunville.",
    "bridge": "Basalt Bridge was opened by Ines Kaur in the spring.",
    "match": "Irene Searkwell struck the first goal.",
}

QUESTION = "Who opened the bridge of Norrland?"


def forget_warnings() -> None:
    """Allows every warning once more."""
    framework._topics.clear()


class HashEmbedding(BaseEmbedding):
    """Embeddings of hashed bags of words: deterministic, and texts that share words are near each other."""

    def _embed(self, text: str) -> list[float]:
        vector = [0.0] * 64
        for word in re.findall(r"\w+", text.lower()):
            vector[hashlib.sha256(word.encode()).digest()[0] % 64] += 1.0
        return vector

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._embed(query)


class RecordingEngine(MACEngine):
    """The real engine; it notes every question with its contexts, and can be held up before it answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[tuple[str, tuple[str, ...] | None]] = []
        self.gate = threading.Event()
        self.gate.set()

    def _note(self, question: str | FittedPrompt, contexts: Sequence[str] | None) -> None:
        if isinstance(question, FittedPrompt):
            question, contexts = question.question, question.contexts
        self.asked.append((question, None if contexts is None else tuple(contexts)))

    def answer(self, questions: Sequence[str | FittedPrompt], **options: Any) -> list[Answer]:
        for question, contexts in zip(questions, options.get("contexts") or [None] * len(questions)):
            self._note(question, contexts)
        assert self.gate.wait(timeout=20), "the event loop was blocked"
        return super().answer(questions, **options)

    def stream(self, question: str | FittedPrompt, **options: Any) -> Iterator[str]:
        self._note(question, options.get("contexts"))
        pieces = super().stream(question, **options)
        return self._held(pieces)

    def _held(self, pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            yield piece
            assert self.gate.wait(timeout=20), "the event loop was blocked"


class EventLog(BaseEventHandler):
    """Collects instrumentation events."""

    events: list[Any]

    @classmethod
    def class_name(cls) -> str:
        return "EventLog"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.events]


def reference(engine: RecordingEngine, **options: Any) -> str:
    text = engine.answer([QUESTION], **options)[0].text
    engine.asked.clear()
    return text


def user(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=text)
