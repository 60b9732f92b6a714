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

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.integrations.framework import in_thread
from mac_rag.integrations.llama_index.retriever import kept_text
from mac_rag.memory.interface import BankContents

# Roles whose messages say something of the world; the others are instructions, and calls of tools.
_REMEMBERED = (MessageRole.USER, MessageRole.ASSISTANT)


class MACMemoryBlock(BaseMemoryBlock[str]):
    """A block of LlamaIndex's `Memory` that remembers what a conversation has flushed, and recalls what is attended to.

    Each message of user and assistant becomes a document of the engine's bank, dated by the moment it comes. The block
    recalls those to which the latest message of the user pays most attention, in the order in which they were said,
    within `token_limit`. A session sees its own messages alone: those of others have exactly zero influence.

    The bank must keep texts (`MemoryBank(keep_texts=True)`, or `mac-rag adapt --keep-texts`), because a memory gives no
    texts back. What the bank holds beside conversations is not recalled; `MACLLM` and `MACNodePostprocessor` read it.

    Thread-safe.

    Examples:
        >>> import asyncio
        >>> from llama_index.core.llms import ChatMessage
        >>> from mac_rag.memory import MemoryBank
        >>> from mac_rag.model import MACModel
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> block = MACMemoryBlock(MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True)), token_limit=16)
        >>> said = [ChatMessage("A storm has hit Wunville."), ChatMessage("Irene Searkwell struck the first goal.")]
        >>> asyncio.run(block.aput(said, session_id="anna"))
        >>> asyncio.run(block.aget([ChatMessage("Which town did the storm hit?")], session_id="anna"))
        'user: A storm has hit Wunville.'

    Args:
        engine: the engine; its bank must be writable.
        token_limit: largest number of tokens of what is recalled, by LlamaIndex's tokenizer unless another is given.
        name, description, priority, accept_short_term_memory: as all blocks have them.
        tokenizer: from a text to its tokens, of which the number counts.

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
                "MACMemoryBlock recalls what was said as text, but the engine's bank keeps no texts; give the engine "
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
        """Adapts the bank to messages; those of tools and systems, and those without text, are left out."""
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
        """What was said and matters to the latest message of the user, a line for each message; may be empty."""
        said = ((message.content or "").strip() for message in messages or () if message.role == MessageRole.USER)
        asked = [text for text in said if text]
        return await in_thread(self._recall, asked[-1], _Session(session_id)) if asked else ""

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Leaves out the oldest messages until so many tokens less are left; None if all must go."""
        lines = content.split("\n")
        room = len(self._tokenizer(content)) - tokens_to_truncate
        while lines and len(self._tokenizer("\n".join(lines))) > room:
            lines.pop(0)
        return "\n".join(lines) or None

    def said_in(self, session_id: str | None) -> Container[str]:
        """The documents of one session, for `allowed` of the engine: answers then rest on what was said in it alone."""
        return _Session(session_id)

    def forget(self, session_id: str | None) -> int:
        """Forgets all that was said in a session; returns the number of messages."""
        session = _Session(session_id)
        said = [name for name in self._engine.snapshot.document_ids if name in session]
        for name in said:
            self._engine.forget(name)
        return len(said)

    def _recall(self, question: str, session: _Session) -> str:
        bank = self._engine.snapshot
        if not any(name in session for name in bank.document_ids):
            return ""
        # A message beyond the model's limit is several questions.
        parts = self._engine.model.input_encoder.split(question)
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
    """A message as a line: who said it, and what."""
    member, text = kept_text(bank, document_id)
    return f"{member.metadata['role']}: {' '.join(text.split())}"


class _Session(Container[str]):
    """The documents of one session, whose ids begin with its quoted name."""

    def __init__(self, session_id: str | None) -> None:
        self.prefix = f"session/{'' if session_id is None else quote(session_id, safe='') + '!'}/"

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and document_id.startswith(self.prefix)

    # Questions of one session that come at once share a batch.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Session) and self.prefix == other.prefix

    def __hash__(self) -> int:
        return hash(self.prefix)
