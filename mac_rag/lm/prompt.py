"""Turns documents, questions and answers into the base LM's tokens: one format for training and inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mac_rag.config import PromptFormat


@dataclass(frozen=True)
class FittedPrompt:
    """A question with documents in front of it, as token ids that fit the LM's window.

    Examples:
        >>> from mac_rag import MACModel
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> documents = ["A storm has hit Wunville.", "Insurers expect to pay. " * 500, "It has 760 workers."]
        >>> prompt = model.fit_to_window("What hit Wunville?", documents, overflow="truncate")
        >>> prompt.truncated, len(prompt.contexts), prompt.contexts[0]  # the second is shortened, the third left out
        (True, 2, 'A storm has hit Wunville.')

    Attributes:
        question: x, the text.
        ids: token ids of the base LM: `d_1 + ... + d_k + x`, ending where the answer begins.
        contexts: d_1 to d_k as they stand in the prompt, possibly cut.
        truncated: True if documents were cut or left out to fit the window.
        question_ids: token ids of the question for the input encoder; empty where no memory is involved.
    """

    question: str
    ids: tuple[int, ...]
    contexts: tuple[str, ...]
    truncated: bool = False
    question_ids: tuple[int, ...] = ()


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
        # Tokens that the tokenizer puts in front of a text: <s> for Llama, none for GPT-2.
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
        """The token ids of `fit_to_window`."""
        return list(self.fit_to_window(question, contexts, room).ids)

    def fit_to_window(self, question: str, contexts: Sequence[str] = (), room: int | None = None) -> FittedPrompt:
        """`d_1 + ... + d_k + x`, with contexts cut or left out if they do not fit.

        Retrievers put the best document first, and a whole document is worth more than a part. So the first documents
        stay whole as long as there is room, the next one is cut between tokens, and the others are left out. The
        question is never cut: if it does not fit by itself, the prompt is longer than `room`.

        Args:
            question: x.
            contexts: d_1 to d_k, in the order of the prompt. Each is tokenized once; one that is cut, once more.
            room: largest number of tokens of the prompt; None for no limit.
        """
        start, end = self.start, self.question(question)
        documents = [self.document(text) for text in contexts]
        used = len(start) + sum(map(len, documents)) + len(end)
        if room is None or not contexts or used <= room:
            ids = [*start, *(token for document in documents for token in document), *end]
            return FittedPrompt(question, tuple(ids), tuple(contexts))
        left = room - len(start) - len(end)
        ids, fitting = list(start), []
        for text, document in zip(contexts, documents, strict=True):
            text = text.strip()
            if not text:
                continue
            if len(document) > left:
                text = self._beginning(text, left)
                if text.strip():
                    fitting.append(text)
                    ids += self.document(text)
                break
            fitting.append(text)
            ids += document
            left -= len(document)
        return FittedPrompt(question, (*ids, *end), tuple(fitting), truncated=True)

    def _beginning(self, text: str, room: int) -> str:
        """The longest beginning of a text whose document has at most `room` tokens."""
        ids = self._ids(text)
        for length in range(min(len(ids), room), 0, -1):
            cut: str = self.tokenizer.decode(ids[:length]).rstrip("\N{REPLACEMENT CHARACTER}")
            # The cut text may have one token more when it is tokenized again.
            if len(self.document(cut)) <= room:
                return cut
        return ""
