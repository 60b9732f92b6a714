"""The pieces of a prompt that an LM with block attention reads separately: opening, document, question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mac_rag.errors import ConfigError
from mac_rag.lm.chat import ChatTemplate, Message
from mac_rag.lm.text_tokenizer import text_tokenizer

_DOCUMENT, _QUESTION = "{document}", "{question}"
_SPLIT = "\N{OBJECT REPLACEMENT CHARACTER}{document}\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the documents


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
        texts: the tokenizer of texts.
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
            self._said = [] if system is None else [Message("system", system)]
            start, (head, tail) = [], self._chat.around(self._said)
        self._before = before
        opening = head + before
        # A space belongs to the word after it: in most vocabularies both are one token.
        self._space = opening[len(opening.rstrip(" ")) :]
        self.opening = start + self.texts.ids(opening.rstrip(" "))
        self._question = (between, after + tail)

    def document(self, text: str) -> list[int]:
        """The ids of a document after the opening."""
        return self.texts.ids(self._space + text.strip())

    def question(self, text: str, contexts: Sequence[str] = ()) -> list[int]:
        """The ids of a question after a document, ending where the answer begins.

        `contexts` are further documents, whose texts stand before the question.
        """
        between, after = self._question
        return self.texts.ids(
            "".join(f"\n\n{context.strip()}" for context in contexts) + between + text.strip() + after
        )

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation after a document, ending where the assistant's answer begins.

        The document stands at the beginning of the first turn. A system message follows it there, since the opening is
        the same for all conversations.

        Args:
            messages: the conversation, in turns as the chat template takes them; the last one is the user's.

        Raises:
            ConfigError: for a tokenizer without a chat template.
            PromptError: for roles that the template refuses.
        """
        if self._chat is None:
            raise ConfigError("the tokenizer has no chat template, so this LM reads no conversations; ask a question")
        first = [message.text for message in messages[:2] if message.role == "system"]
        said = list(messages[len(first) :])
        text = "\n\n".join([*first, said[0].text])
        turns = [*self._said, Message("user", f"{self._before}{_SPLIT}\n\n{text}"), *said[1:]]
        return self.texts.ids(self._chat.written(turns).partition(_SPLIT)[2])

    def answer(self, text: str) -> list[int]:
        """The ids of an answer, with the token that ends it."""
        if self._chat is not None:
            return self._chat.answer(text)
        return [*self.texts.ids(" " + text.strip()), self.end_tokens[0]]
