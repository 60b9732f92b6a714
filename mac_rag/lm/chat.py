"""Prompts written as a conversation by the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Literal

from jinja2 import TemplateError

from mac_rag.config import PromptFormat
from mac_rag.errors import ModelLoadError, PromptError
from mac_rag.lm.prompt import Exchange, FittedPrompt, PromptEncoder
from mac_rag.lm.text_tokenizer import text_tokenizer


@dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: who wrote it.
        text: its text.
    """

    role: Literal["system", "user", "assistant"]
    text: str


class ChatTemplate:
    """A tokenizer's chat template, filled with texts that never become control tokens.

    The ids equal those of the tokenizer's `apply_chat_template` for texts without surrounding spaces and without
    control tokens. The template decides on the first token, a default system message, and dates. If the template has a
    switch for it (`enable_thinking`), the assistant answers without thinking first.

    Some LMs treat characters such as `[INST]` as a control sequence although their tokenizer does not. These are
    ordinary tokens and cannot be told apart from text.

    Args:
        tokenizer: a tokenizer with a chat template.

    Attributes:
        takes_system: True if the template writes system messages.

    Raises:
        ModelLoadError: for a tokenizer without a chat template, or one that cannot write a question and an answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ModelLoadError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; take an instruct LM, "
                "or leave out prompt.chat"
            )
        self._tokenizer = tokenizer
        self._texts = text_tokenizer(tokenizer)
        self._nonce = token_hex(8)
        self._slots = re.compile(f"{self._nonce}z([0-9]+)z")
        question, answer = Message("user", ""), Message("assistant", "")
        try:
            asked = self._frame([question], start_answer=True)
            answered = self._frame([question, answer])
            asked_again = self._frame([question, answer, question], start_answer=True)
        except PromptError as error:
            raise ModelLoadError(f"{error}; leave out prompt.chat") from None
        self.takes_system = self._writes_system()
        # Split a conversation at the slots of its texts to get what the template writes between them.
        self._answer_start = self._slots.split(asked)[2]
        _, _, before_answer, _, after_answer = self._slots.split(answered)
        between = self._slots.split(asked_again)[4]
        # Some templates write more before a finished answer than where an answer starts, a space for instance.
        has_start = before_answer.startswith(self._answer_start)
        self._answer_head = before_answer.removeprefix(self._answer_start) if has_start else ""
        end = self._texts.first_control(after_answer)
        place: int
        self.end_token: int
        self.end_token, place = end or (tokenizer.eos_token_id, 0)
        self._answer_end = after_answer[:place] or self._texts.mark(tokenizer.eos_token)
        self._next_question = between.removeprefix(self._answer_end)

    def _writes_system(self) -> bool:
        try:
            self._frame([Message("system", ""), Message("user", "")], start_answer=True)
        except PromptError:
            return False
        return True

    def _frame(self, messages: Sequence[Message], *, start_answer: bool = False) -> str:
        """The conversation as the template writes it, with marked control tokens and a slot in place of each text."""
        slots = [f"{self._nonce}z{number}z" for number in range(len(messages))]
        roles = [message.role for message in messages]
        try:
            written: str = self._tokenizer.apply_chat_template(
                [{"role": role, "content": slot} for role, slot in zip(roles, slots)],
                tokenize=False,
                add_generation_prompt=start_answer,
                enable_thinking=False,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptError(
                f"the chat template of {self._tokenizer.name_or_path!r} refuses messages by {', '.join(roles)}: {error}"
            ) from error
        unwritten = [role for role, slot in zip(roles, slots) if written.count(slot) != 1]
        if unwritten:
            raise PromptError(
                f"the chat template of {self._tokenizer.name_or_path!r} does not write the message of {unwritten[0]} "
                f"exactly once, in a conversation of {', '.join(roles)}"
            )
        return self._texts.mark(written)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer begins.

        Raises:
            PromptError: for roles that the template refuses or leaves out.
        """
        return self._texts.ids(self.written(messages))

    def written(self, messages: Sequence[Message]) -> str:
        """A conversation up to where the assistant's answer begins, with marked control tokens.

        Raises:
            PromptError: as `ids`.
        """
        frame = self._frame(messages, start_answer=True)
        return self._slots.sub(lambda slot: messages[int(slot[1])].text.strip(), frame)

    def around(self, messages: Sequence[Message]) -> tuple[str, str]:
        """What the template writes before and after the text of a user's turn, up to the answer.

        `messages` come before the turn. Control tokens are marked in both parts.
        """
        said = [*messages, Message("user", "")]
        pieces = self._slots.split(self._frame(said, start_answer=True))
        texts = [message.text.strip() for message in messages]
        before = "".join(piece + text for piece, text in zip(pieces[::2], texts)) + pieces[2 * len(texts)]
        return before, pieces[-1]

    def answer(self, text: str) -> list[int]:
        """Token ids of an answer after `ids`, with the token that ends it."""
        return self._texts.ids_after(self._answer_start, self._answer_head + text.strip() + self._answer_end)

    def next_question(self, text: str) -> list[int]:
        """Token ids of a further question after `answer`, ending where the assistant's answer begins."""
        return self._texts.ids_after(self._answer_end, self._next_question + text.strip() + self._answer_start)


class ChatPromptEncoder(PromptEncoder):
    """Writes prompts with the tokenizer's chat template. The user's turn holds the documents and the question.

    Args:
        tokenizer: the base LM's tokenizer, with a chat template.
        prompt_format: the template of a document, and the system message.

    Attributes:
        chat: the chat template.

    Raises:
        ModelLoadError: as `PromptEncoder` and `ChatTemplate`; and for a system message, if the template writes none.
    """

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat) -> None:
        super().__init__(tokenizer, prompt_format)
        self.chat = ChatTemplate(tokenizer)
        if self.format.system is not None and not self.chat.takes_system:
            raise ModelLoadError(
                f"the chat template of {tokenizer.name_or_path!r} takes no system message; leave out prompt.system "
                f"(it is {self.format.system!r})"
            )
        self.end_tokens = (self.eos, self.chat.end_token)

    def messages(self, question: str, contexts: Sequence[str] = ()) -> list[Message]:
        """The conversation whose user's turn holds documents and then a question."""
        system = [] if self.format.system is None else [Message("system", self.format.system)]
        turn = "".join(map(self.written_document, contexts)) + question.strip()
        return [*system, Message("user", turn)]

    def question(self, text: str) -> list[int]:
        """Token ids of a conversation that asks a question without documents."""
        return self.chat.ids(self.messages(text))

    def answer(self, text: str) -> list[int]:
        return self.chat.answer(text)

    def exchanges(self, contexts: Sequence[str], pairs: Sequence[Exchange]) -> list[tuple[list[int], list[int]]]:
        prompts = [self.prompt(pairs[0][0], contexts)]
        prompts += [self.chat.next_question(question) for question, _ in pairs[1:]]
        return [(prompt, self.answer(answer)) for prompt, (_, answer) in zip(prompts, pairs, strict=True)]

    def after_examples(self, examples: Sequence[Exchange], question: str) -> list[int]:
        *system, last = self.messages(question)
        turns = [[Message("user", asked), Message("assistant", answer)] for asked, answer in examples]
        return self.chat.ids([*system, *(message for turn in turns for message in turn), last])

    def fit_to_window(self, question: str, contexts: Sequence[str] = (), room: int | None = None) -> FittedPrompt:
        """As `PromptEncoder.fit_to_window`; the whole user's turn is tokenized as one text, as in any conversation."""
        ids = self.chat.ids(self.messages(question, contexts))
        if room is None or not contexts or len(ids) <= room:
            return FittedPrompt(question, tuple(ids), tuple(contexts))
        documents = [self.document(text) for text in contexts]
        left = room - len(self.question(question))
        while True:
            texts = [text for text, _ in self.shortened(contexts, documents, left)]
            ids = self.chat.ids(self.messages(question, texts))
            if len(ids) <= room or not texts:
                return FittedPrompt(question, tuple(ids), tuple(texts), truncated=True)
            left -= len(ids) - room  # joined texts may take more tokens than each alone

    def fit_conversation(
        self, messages: Sequence[Message], question: str, contexts: Sequence[str] = (), room: int | None = None
    ) -> FittedPrompt:
        """Token ids of a whole conversation. If it does not fit, cuts or removes the contexts inside its messages.

        Args:
            messages: the conversation; it must end with the user's turn. If it has no system message, the format's is
                added. If the template takes no system message, it becomes the beginning of the user's turn.
                Neighbouring messages of one role are joined.
            question: the question for the memory.
            contexts: texts within the messages that may be cut, the best first.
            room: largest number of tokens of the prompt; None for no limit.

        Returns:
            The prompt. It is longer than `room` if the conversation without the contexts is.

        Raises:
            PromptError: for a conversation that does not end with the user's turn, or that the template refuses.
        """
        texts = list(contexts)
        documents = [self.texts.ids(text) for text in contexts]
        left = sum(map(len, documents))
        ids = self.chat.ids(self.turns(messages))
        while room is not None and len(ids) > room and texts:
            left -= len(ids) - room
            texts = [text for text, _ in self.shortened(contexts, documents, left)] if left > 0 else []
            ids = self.chat.ids(self.turns(with_shorter(messages, contexts, texts)))
        return FittedPrompt(question, tuple(ids), tuple(texts), truncated=texts != list(contexts))

    def turns(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation in the form that the template takes; arguments and errors as for `fit_conversation`."""
        said = [message for message in messages if message.text.strip()]
        if self.format.system is not None and all(message.role != "system" for message in said):
            said.insert(0, Message("system", self.format.system))
        if not self.chat.takes_system:
            said = [Message("user", message.text) if message.role == "system" else message for message in said]
        turns: list[Message] = []
        for message in said:
            if turns and turns[-1].role == message.role:
                message = Message(message.role, f"{turns.pop().text.strip()}\n\n{message.text.strip()}")
            turns.append(message)
        if not turns or turns[-1].role != "user":
            last = turns[-1].role if turns else "nobody"
            raise PromptError(f"the last message is from {last}; end the conversation with a message from the user")
        return turns


def with_shorter(messages: Sequence[Message], contexts: Sequence[str], texts: Sequence[str]) -> list[Message]:
    """The messages with `contexts` replaced by `texts`; contexts beyond the last text are removed."""
    kept = [*texts, *[""] * (len(contexts) - len(texts))]
    shorter = []
    for message in messages:
        text = message.text
        for before, after in zip(contexts, kept):
            text = text.replace(before, after)
        shorter.append(Message(message.role, text))
    return shorter


def prompt_encoder(tokenizer: Any, prompt_format: PromptFormat) -> PromptEncoder:
    """The encoder that writes prompts in a format.

    Raises:
        ModelLoadError: as `PromptEncoder` and `ChatPromptEncoder`.
    """
    return (ChatPromptEncoder if prompt_format.chat else PromptEncoder)(tokenizer, prompt_format)
