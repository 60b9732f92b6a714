"""One question of one call of a `ChatMAC`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mac_rag.integrations.framework import Options
from mac_rag.integrations.langchain.filters import WhereMetadata
from mac_rag.lm.chat import Message
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.memory.metadata_filters import Filters


@dataclass(frozen=True)
class Settings:
    """Fields of a `ChatMAC` that a call may set."""

    use_memory: bool | None
    filters: Filters | None
    as_of: str | datetime | None
    k: int | None
    memory_weight: float | None
    sources: int
    min_confidence: float | None


@dataclass(frozen=True)
class Call:
    """One question of one call, and how it is answered.

    Attributes:
        question: the question, or the last message.
        before: the conversation before it; empty where the checkpoint reads none.
        contexts: texts to answer from; None for those of the engine's retriever.
        memory: True to answer with the bank.
        allowed: documents that may have influence; None for all.
    """

    question: str
    before: tuple[Message, ...]
    contexts: tuple[str, ...] | None
    memory: bool
    allowed: WhereMetadata | None
    settings: Settings
    options: Options

    @property
    def influence(self) -> dict[str, Any]:
        """What decides which documents have influence, as all methods of the engine take it."""
        return {"allowed": self.allowed, "as_of": self.settings.as_of}

    @property
    def arguments(self) -> dict[str, Any]:
        """What `MACEngine.answer` and `stream` have in common."""
        return {
            **self.influence,
            "use_memory": self.memory,
            "memory_weight": self.settings.memory_weight,
            "max_new_tokens": self.options.max_new_tokens,
            "sampling": self.options.sampling,
        }


@dataclass(frozen=True)
class Read:
    """A prompt with the documents that were retrieved for it: their ids, and their whole texts."""

    prompt: FittedPrompt
    ids: tuple[str, ...]
    texts: tuple[str, ...]
