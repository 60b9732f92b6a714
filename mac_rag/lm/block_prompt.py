"""The pieces of a prompt that an LM with block attention reads separately: opening, document, question."""

from __future__ import annotations

from typing import Any

from mac_rag.errors import ConfigError
from mac_rag.lm.chat import ChatTemplate, Message
from mac_rag.lm.text_tokenizer import text_tokenizer

_DOCUMENT, _QUESTION = "{document}", "{question}"


class BlockPrompt:
    """Token ids of opening, document, question and answer. Joined, they are a prompt with one document and its answer.

    With a chat template, the opening is the conversation up to where the document begins in the user's turn. Without
    one, it is the tokens that the tokenizer puts before a text and the beginning of the turn; the question then ends
    with `Answer:`.

    Args:
        tokenizer: the LM's tokenizer.
        turn: the user's turn, with `{document}` and after it `{question}`.
        system: the system message of a chat; None for the chat template's default.

    Attributes:
        opening: ids before every document.
        end_tokens: ids of the tokens that end an answer.

    Raises:
        ConfigError: for a turn without the two fields, and for a system message without a chat template that takes it.
        ModelLoadError: for a tokenizer without a fast version or end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, turn: str, system: str | None = None) -> None:
        before, found, rest = turn.partition(_DOCUMENT)
        between, asked, after = rest.partition(_QUESTION)
        if not found or not asked or _DOCUMENT in rest or _QUESTION in after:
            raise ConfigError(f"the turn is {turn!r}; it must hold {_DOCUMENT} and after it {_QUESTION}, once each")
        self.texts = text_tokenizer(tokenizer)
        self._chat = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self.end_tokens: tuple[int, ...] = (tokenizer.eos_token_id, *([self._chat.end_token] if self._chat else ()))
        if system is not None and not (self._chat and self._chat.takes_system):
            raise ConfigError(f"the tokenizer has no chat template that takes a system message; leave out {system!r}")
        if self._chat is None:
            start = [token for token in self.texts.ids("", special=True) if token != tokenizer.eos_token_id]
            head, tail = "", "\nAnswer:"
        else:
            said = [] if system is None else [Message("system", system)]
            start, (head, tail) = [], self._chat.around(said)
        opening = head + before
        # A space belongs to the word after it: in most vocabularies both are one token.
        self._space = opening[len(opening.rstrip(" ")) :]
        self.opening = start + self.texts.ids(opening.rstrip(" "))
        self._question = (between, after + tail)

    def document(self, text: str) -> list[int]:
        """The ids of a document after the opening."""
        return self.texts.ids(self._space + text.strip())

    def question(self, text: str) -> list[int]:
        """The ids of a question after a document, ending where the answer begins."""
        between, after = self._question
        return self.texts.ids(between + text.strip() + after)

    def answer(self, text: str) -> list[int]:
        """The ids of an answer, with the token that ends it."""
        if self._chat is not None:
            return self._chat.answer(text)
        return [*self.texts.ids(" " + text.strip()), self.end_tokens[0]]
