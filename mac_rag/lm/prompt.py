"""How documents, questions and answers become the base LM's tokens: one format for training and for use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mac_rag.config import PromptFormat


class PromptEncoder:
    """Writes prompts `LM(d + x)` as token ids of the base LM.

    Args:
        tokenizer: the base LM's tokenizer; it must have an end-of-sequence token, which closes every answer.
        prompt_format: the templates.

    Raises:
        ValueError: when the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no eos_token; answers could not end")
        self.tokenizer = tokenizer
        self.format = prompt_format or PromptFormat()
        # What the tokenizer itself puts in front of a text: <s> for Llama, nothing for GPT-2.
        self.start: list[int] = [i for i in tokenizer("").input_ids if i != tokenizer.eos_token_id]
        self.eos: int = tokenizer.eos_token_id

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def document(self, text: str) -> list[int]:
        return self._ids(self.format.document.replace("{document}", text.strip()))

    def question(self, text: str) -> list[int]:
        return self._ids(self.format.question.replace("{question}", text.strip()))

    def answer(self, text: str) -> list[int]:
        return [*self._ids(self.format.answer.replace("{answer}", text.strip())), self.eos]

    def prompt_start(self, contexts: Sequence[str]) -> list[int]:
        """`d_1 + ... + d_k`, the part of a prompt before its question."""
        ids = list(self.start)
        for context in contexts:
            ids += self.document(context)
        return ids

    def prompt(self, question: str, contexts: Sequence[str] = (), room: int | None = None) -> list[int]:
        """`d_1 + ... + d_k + x`, contexts in the order given, as ids that end where the answer begins.

        Args:
            question: x.
            contexts: d_1 to d_k.
            room: tokens beyond which contexts are `shortened`, a question never; None keeps all.
        """
        ids = self.prompt_start(contexts) + self.question(question)
        if room is None or not contexts or len(ids) <= room:
            return ids
        return self.prompt(question, self.shortened(question, contexts, room))

    def shortened(self, question: str, contexts: Sequence[str], room: int) -> tuple[str, ...]:
        """The documents that fit with the question into `room` tokens.

        A retriever puts the best in front, and a document is worth most whole. So the first ones stay whole as long as
        there is room, the next keeps its beginning, cut between tokens, and the others are dropped.
        """
        kept: list[str] = []
        left = room - len(self.prompt(question))
        for text in filter(None, map(str.strip, contexts)):
            used = len(self.document(text))
            if used > left:
                beginning = self._beginning(text, left)
                return (*kept, beginning) if beginning.strip() else tuple(kept)
            kept.append(text)
            left -= used
        return tuple(kept)

    def _beginning(self, text: str, room: int) -> str:
        """As many of a text's first tokens as make a document of `room` tokens."""
        ids = self._ids(text)
        for length in range(min(len(ids), room), 0, -1):
            cut: str = self.tokenizer.decode(ids[:length]).rstrip("\N{REPLACEMENT CHARACTER}")
            # Cut text may tokenize into a token more than it was cut to.
            if len(self.document(cut)) <= room:
                return cut
        return ""
