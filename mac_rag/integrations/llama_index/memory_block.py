"""MACMemoryBlock: the long-term memory of an agent, in which conversations become memory tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.utils import get_tokenizer

from mac_rag.bank.interface import BankContents
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.integrations.framework import in_thread
from mac_rag.integrations.llama_index.retriever import kept_text

# Roles whose messages are remembered; the others are instructions, and calls and results of tools.
_REMEMBERED = (MessageRole.USER, MessageRole.ASSISTANT)


class MACMemoryBlock(BaseMemoryBlock[str]):
    """A block of LlamaIndex's `Memory` that remembers old messages of a conversation, and recalls relevant ones.

    Each message of user and assistant that LlamaIndex flushes to the block becomes a document of the engine's bank,
    with the present time as its date. The block recalls the messages to which the user's latest message pays most
    attention, in their original order, within `token_limit`. A session sees only its own messages: those of other
    sessions have exactly zero influence.

    The bank must keep texts (`MemoryBank(keep_texts=True)`, or `mac-rag adapt --keep-texts`), because texts cannot be
    restored from memory tokens. Other documents of the bank are not recalled; `MACLLM` and `MACNodePostprocessor` read
    them.

    Thread-safe.

    Examples:
        >>> import asyncio
        >>> from llama_index.core.llms import ChatMessage
        >>> from mac_rag.bank import MemoryBank
        >>> from mac_rag.model import MACModel
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> block = MACMemoryBlock(MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True)), token_limit=16)
        >>> messages = [ChatMessage("A storm has hit Wunville."), ChatMessage("Irene Searkwell struck the first goal.")]
        >>> asyncio.run(block.aput(messages, session_id="anna"))
        >>> asyncio.run(block.aget([ChatMessage("Which town did the storm hit?")], session_id="anna"))
        'user: A storm has hit Wunville.'

    Args:
        engine: the engine; its bank must be writable.
        token_limit: most tokens to recall.
        name, description, priority, accept_short_term_memory: as all blocks have them.
        tokenizer: maps a text to its tokens, to count them; None for LlamaIndex's tokenizer.

    Raises:
        ConfigError: for a bank that keeps no texts.
    """

    name: str = Field(default="mac_memory")
    token_limit: int = Field(default=500, ge=1)
    _engine: MACEngine = PrivateAttr()
    _tokenizer: Callable[[str], Sequence[Any]] = PrivateAttr()

    def __init__(
        self,
        engine: MACEngine,
        *,
        token_limit: int = 500,
        name: str = "mac_memory",
        description: str | None = "What was said earlier",
        priority: int = 0,
        accept_short_term_memory: bool = True,
        tokenizer: Callable[[str], Sequence[Any]] | None = None,
    ) -> None:
        super().__init__(
            name=name,
            description=description,
            priority=priority,
            accept_short_term_memory=accept_short_term_memory,
            token_limit=token_limit,
        )
        if not engine.bank.keep_texts:
            raise ConfigError(
                "MACMemoryBlock recalls messages as text, but the engine's bank keeps no texts; give the engine "
                "MemoryBank(model.fingerprint, keep_texts=True)"
            )
        self._engine = engine
        self._tokenizer = tokenizer or get_tokenizer()

    @classmethod
    def class_name(cls) -> str:
        return "MACMemoryBlock"

    @property
    def engine(self) -> MACEngine:
        """The engine of the block."""
        return self._engine

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """Adapts the bank to messages, except those of tools and systems, and those without text."""
        now = time.time_ns()
        date = datetime.fromtimestamp(now // 10**9, UTC).isoformat()
        documents = []
        for number, message in enumerate(messages):
            text = (message.content or "").strip()
            if message.role in _REMEMBERED and text:
                session = _Session(message.additional_kwargs.get("session_id"))
                place = f"{session.prefix}{now:020d}-{number:06d}-{uuid4().hex[:8]}"  # in the order of time
                documents.append(Document(place, text, {"role": message.role.value, "date": date}))
        if documents:
            await in_thread(self._engine.adapt, documents)

    async def _aget(
        self, messages: list[ChatMessage] | None = None, session_id: str | None = None, **block_kwargs: Any
    ) -> str:
        """Earlier messages that are relevant to the user's latest message, one line for each; may be empty."""
        texts = ((message.content or "").strip() for message in messages or () if message.role == MessageRole.USER)
        questions = [text for text in texts if text]
        return await in_thread(self._recall, questions[-1], _Session(session_id)) if questions else ""

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Drops the oldest messages until at least so many tokens are saved; None if no message is left."""
        lines = content.split("\n")
        room = len(self._tokenizer(content)) - tokens_to_truncate
        while lines and len(self._tokenizer("\n".join(lines))) > room:
            lines.pop(0)
        return "\n".join(lines) or None

    def said_in(self, session_id: str | None) -> Container[str]:
        """The documents of one session. As the engine's `allowed`, they restrict answers to this session's messages."""
        return _Session(session_id)

    def forget(self, session_id: str | None) -> int:
        """Forgets all messages of a session; returns their number."""
        session = _Session(session_id)
        names = [name for name in self._engine.snapshot.document_ids if name in session]
        for name in names:
            self._engine.forget(name)
        return len(names)

    def _recall(self, question: str, session: _Session) -> str:
        bank = self._engine.snapshot
        if not any(name in session for name in bank.document_ids):
            return ""
        # A message that exceeds the model's limit is split into several questions.
        parts = self._engine.model.split_question(question)
        ids, mass = self._engine.document_attention(parts, session)
        chosen: dict[str, str] = {}
        room = self.token_limit
        for place in mass.mean(0).argsort(descending=True, stable=True).tolist():
            line = _line(bank, ids[place])
            tokens = len(self._tokenizer(f"{line}\n"))
            if tokens > room:
                break
            chosen[ids[place]] = line
            room -= tokens
        return "\n".join(chosen[name] for name in sorted(chosen))


def _line(bank: BankContents, document_id: str) -> str:
    """A message as one line: its role and its text."""
    member, text = kept_text(bank, document_id)
    return f"{member.metadata['role']}: {' '.join(text.split())}"


class _Session(Container[str]):
    """The documents of one session, whose ids begin with its quoted name."""

    def __init__(self, session_id: str | None) -> None:
        self.prefix = f"session/{'' if session_id is None else quote(session_id, safe='') + '!'}/"

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and document_id.startswith(self.prefix)

    # Equality lets simultaneous questions of one session share a batch.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Session) and self.prefix == other.prefix

    def __hash__(self) -> int:
        return hash(self.prefix)
