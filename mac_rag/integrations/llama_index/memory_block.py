"""MACMemoryBlock: what was said long ago, as long-term memory of LlamaIndex's agents and chat engines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, DocumentError
from mac_rag.integrations.llama_index.filters import FilteredDocuments
from mac_rag.integrations.llama_index.threads import in_thread

SESSION = "mac_session"  # metadata key of a turn: the session that it belongs to
ROLE = "mac_role"
_LAST_WORDS = 40  # of a message beyond the input encoder's limit


class MACMemoryBlock(BaseMemoryBlock[str]):
    """Long-term memory for `llama_index.core.memory.Memory`: turns that leave the short-term memory go into a bank.

    Each turn is a document. For the next message, the turns with most attention come back as text, the oldest first,
    within a budget of tokens. Turns of other sessions have no influence, as if the bank had never held them: the bank
    knows the session of each turn, and only the session's own ones are `allowed` (see `MACEngine.answer`).

    The same words of the same role in one session are one turn. Messages without text, such as calls of tools, are left
    out.

    Examples:
        >>> from llama_index.core.memory import Memory
        >>> from mac_rag import MACModel, MemoryBank
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True))
        >>> memory = Memory.from_defaults(session_id="ada", memory_blocks=[MACMemoryBlock(engine)])

    Args:
        engine: an engine whose bank keeps texts. It may hold other documents as well; they are never returned.
        token_budget: most tokens of the turns that come back, counted by the LM's tokenizer.
        name, priority: as LlamaIndex's memory blocks have them.

    Raises:
        ConfigError: for a bank that keeps no texts.
    """

    token_budget: int = Field(default=400, ge=1, description="Most tokens of the turns that come back.")
    _engine: MACEngine = PrivateAttr()

    def __init__(
        self, engine: MACEngine, *, token_budget: int = 400, name: str = "long_term_memory", priority: int = 0
    ) -> None:
        if not engine.snapshot.keep_texts:
            raise ConfigError(
                "MACMemoryBlock returns what was said, but the bank keeps no texts; make it with keep_texts=True"
            )
        super().__init__(
            name=name,
            description="What was said earlier in this session.",
            priority=priority,
            accept_short_term_memory=True,
            token_budget=token_budget,
        )
        self._engine = engine

    @property
    def engine(self) -> MACEngine:
        """The engine that remembers."""
        return self._engine

    def turns_of(self, session_id: str | None) -> Container[str]:
        """The turns of one session, for `allowed` of the engine; it follows changes of the bank."""
        only = MetadataFilter(key=SESSION, value=session_id or "")
        return FilteredDocuments(self._engine, MetadataFilters(filters=[only]))

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """Remembers turns.

        Raises:
            DocumentError: for a text with half of a surrogate pair or NUL; nothing is then remembered.
        """
        turns = {}
        for message in messages:
            text = message.content or ""
            if text.strip():
                turn = _turn(message.additional_kwargs.get("session_id") or "", message.role.value, text)
                turns[turn.id] = turn
        if turns:
            await in_thread(self._engine.adapt, list(turns.values()))

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        """The turns of the session that the last message attends to most; empty if there are none."""
        said = [text for message in messages or () if (text := message.content or "").strip()]
        if not said:
            return ""
        return await in_thread(self._recalled, said[-1], block_kwargs.get("session_id"))

    def _recalled(self, question: str, session_id: str | None) -> str:
        turns = self.turns_of(session_id)
        bank = self._engine.snapshot
        if not bank.visible_rows(turns).any():
            return ""
        try:
            ids, mass = self._engine.document_attention([question], turns)
        except DocumentError:  # beyond the limit: the end of a message is what it asks
            ids, mass = self._engine.document_attention([" ".join(question.split()[-_LAST_WORDS:])], turns)
        return "\n".join(self._within_budget([ids[place] for place in mass[0].argsort(descending=True).tolist()]))

    def _within_budget(self, ids: Sequence[str]) -> list[str]:
        """The texts of the first turns that fit into the budget, in the order in which they were said."""
        bank, left = self._engine.snapshot, self.token_budget
        tokenizer = self._engine.model.base_lm.tokenizer
        chosen: dict[str, str] = {}
        for name in ids:
            if name not in bank:  # deleted since
                continue
            entry = bank[name]
            [place] = [place for place, member in enumerate(entry.members) if member.document_id == name]
            text = entry.texts[place]
            if text is None:  # lost by a repair
                continue
            line = f"{entry.members[place].metadata[ROLE]}: {text}"
            tokens = len(tokenizer(line, add_special_tokens=False, verbose=False).input_ids)
            if tokens <= left:
                chosen[name] = line
                left -= tokens
        return [chosen[name] for name in bank.document_ids if name in chosen]


def _turn(session_id: str, role: str, text: str) -> Document:
    digest = hashlib.sha256(json.dumps([session_id, role, text]).encode()).hexdigest()
    return Document(f"turn-{digest[:32]}", text, {SESSION: session_id, ROLE: role})
