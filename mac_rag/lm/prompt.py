"""Turns documents, questions and answers into the base LM's tokens: one format for training and inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mac_rag.config import PromptFormat
from mac_rag.errors import ModelLoadError
from mac_rag.lm.text_tokenizer import text_tokenizer

Exchange = tuple[str, str]  # a question and its answer


@dataclass(frozen=True)
class FittedPrompt:
    """A question with documents before it, as token ids that fit the LM's window.

    Examples:
        >>> from mac_rag import MACModel
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> documents = ["A storm has hit Wunville.", "Insurers expect to pay. " * 500, "It has 760 workers."]
        >>> prompt = model.fit_to_window("What hit Wunville?", documents, overflow="truncate")
        >>> prompt.truncated, len(prompt.contexts), prompt.contexts[0]  # the second is shortened, the third left out
        (True, 2, 'A storm has hit Wunville.')

    Attributes:
        question: text of x.
        ids: token ids of the base LM: `d_1 + ... + d_k + x`, ending where the answer begins; for documents in parallel
            `d_1 + x + ... + d_k + x + x`.
        contexts: texts of d_1 to d_k as the prompt holds them, possibly cut.
        truncated: True if documents were cut or left out to fit the window.
        question_ids: token ids of the question for the input encoder; empty if no memory is involved.
        after_memory: token ids after a memory that holds the beginning of the prompt; empty if no memory does.
        read: ids of the documents that the memory reads in place of their texts, the best first.
    """

    question: str
    ids: tuple[int, ...]
    contexts: tuple[str, ...]
    truncated: bool = False
    question_ids: tuple[int, ...] = ()
    after_memory: tuple[int, ...] = ()
    read: tuple[str, ...] = ()


class PromptEncoder:
    """Writes prompts `LM(d + x)` as token ids of the base LM, with the templates of a `PromptFormat`.

    The templates may hold control tokens of the tokenizer. In documents, questions and answers the same characters are
    text and never become control tokens.

    Args:
        tokenizer: the base LM's tokenizer; it must have an end-of-sequence token, which closes every answer.
        prompt_format: the templates.

    Attributes:
        start: ids that the tokenizer puts before a text: <s> for Llama, none for GPT-2.
        eos: id of the tokenizer's end-of-sequence token.
        end_tokens: ids of the tokens that end an answer.

    Raises:
        ModelLoadError: for a tokenizer without an end-of-sequence token, or without a fast version; for documents in
            parallel, also for a tokenizer that puts nothing before a text.
    """

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise ModelLoadError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no eos_token, so answers could not end; "
                "set one in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.format = prompt_format or PromptFormat()
        self.texts = text_tokenizer(tokenizer)
        self.eos: int = tokenizer.eos_token_id
        self.start: list[int] = [i for i in self.texts.ids("", special=True) if i != self.eos]
        if self.format.parallel_documents and not self.start:
            raise ModelLoadError(
                f"the tokenizer of {tokenizer.name_or_path!r} puts no token before a text, so documents that are read "
                "in parallel could not be told apart; leave out prompt.parallel_documents"
            )
        self.end_tokens: tuple[int, ...] = (self.eos,)
        self._document = self.texts.mark(self.format.document)
        self._question = self.texts.mark(self.format.question)
        self._answer = self.texts.mark(self.format.answer)

    def written_document(self, text: str) -> str:
        """A document in its template."""
        return self._document.replace("{document}", text.strip())

    def document(self, text: str) -> list[int]:
        return self.texts.ids(self.written_document(text))

    def question(self, text: str) -> list[int]:
        return self.texts.ids(self._question.replace("{question}", text.strip()))

    def answer(self, text: str) -> list[int]:
        return [*self.texts.ids(self._answer.replace("{answer}", text.strip())), self.eos]

    def segment_ids(self, ids: Sequence[int]) -> list[int]:
        """The segment of each token of a prompt (see `mac_rag.lm.prefix_lm.prefix_mask`)."""
        return segments_of(ids, self.start) if self.format.parallel_documents else [1] * len(ids)

    def positions(self, ids: Sequence[int]) -> int:
        """Number of the LM's positions that a prompt takes."""
        return max(positions_of(self.segment_ids(ids)), default=-1) + 1 if self.format.parallel_documents else len(ids)

    def places_of_documents(self, question: str, contexts: Sequence[str]) -> list[range]:
        """The ranges of documents in the ids of `prompt(question, contexts)`, each with the start before it.

        Documents that are not read in parallel share one range.
        """
        if len(contexts) < 2 or not self.format.parallel_documents:
            return [range(len(self.prompt_start(contexts)))]
        places, end = [], 0
        for context in contexts:
            length = len(self.prompt_start([context]))
            places.append(range(end, end + length))
            end += length + len(self.question(question))
        return places

    def prompt_start(self, contexts: Sequence[str]) -> list[int]:
        """`d_1 + ... + d_k`, the part of a prompt before its question."""
        ids = list(self.start)
        for context in contexts:
            ids += self.document(context)
        return ids

    def exchanges(self, contexts: Sequence[str], pairs: Sequence[Exchange]) -> list[tuple[list[int], list[int]]]:
        """Questions and answers after one set of documents: for each the ids up to its answer, and the answer's ids.

        The first ids are `prompt(question, contexts)`. All ids joined are one sequence for an LM to learn from.
        """
        prompts = [self.prompt(pairs[0][0], contexts), *(self.question(question) for question, _ in pairs[1:])]
        return [(prompt, self.answer(answer)) for prompt, (_, answer) in zip(prompts, pairs, strict=True)]

    def after_examples(self, examples: Sequence[Exchange], question: str) -> list[int]:
        """A question after other questions with their answers (few-shot prompting)."""
        ids = list(self.start)
        for asked, answer in examples:
            ids += self.question(asked) + self.answer(answer)
        return ids + self.question(question)

    def prompt(self, question: str, contexts: Sequence[str] = (), room: int | None = None) -> list[int]:
        """The token ids of `fit_to_window`."""
        return list(self.fit_to_window(question, contexts, room).ids)

    def fit_to_window(self, question: str, contexts: Sequence[str] = (), room: int | None = None) -> FittedPrompt:
        """`d_1 + ... + d_k + x`, with contexts cut or left out if they do not fit.

        Retrievers put the best document first, and a whole document is worth more than a part. So the first documents
        stay whole while there is room, the next one is cut between tokens, and the rest are left out. The question is
        never cut: if it does not fit by itself, the prompt is longer than `room`. Documents in parallel have equal room
        each, and every longer one is cut.

        Args:
            question: x.
            contexts: d_1 to d_k, in the order of the prompt. Each is tokenized once, and once more if it is cut.
            room: largest number of positions that the prompt may take; None for no limit.
        """
        start, end = self.start, self.question(question)
        documents = [self.document(text) for text in contexts]
        if len(contexts) > 1 and self.format.parallel_documents:
            return self._in_parallel(question, contexts, documents, room)
        used = len(start) + sum(map(len, documents)) + len(end)
        if room is None or not contexts or used <= room:
            ids = [*start, *(token for document in documents for token in document), *end]
            return FittedPrompt(question, tuple(ids), tuple(contexts))
        left = room - len(start) - len(end)
        ids, fitting = list(start), []
        for text, document in self.shortened(contexts, documents, left):
            fitting.append(text)
            ids += document
        return FittedPrompt(question, (*ids, *end), tuple(fitting), truncated=True)

    def _in_parallel(
        self, question: str, contexts: Sequence[str], documents: Sequence[list[int]], room: int | None
    ) -> FittedPrompt:
        """`d_1 + x + ... + d_k + x + x`, where each `d_i + x` begins at the first position."""
        asked = self.question(question)
        pairs = list(zip(contexts, documents, strict=True))
        truncated = False
        if room is not None:
            left = room - 2 * (len(self.start) + len(asked))
            truncated = max(map(len, documents)) > left
            if truncated:
                pairs = [pair for text, ids in pairs for pair in self.shortened([text], [ids], left)]
            if len(pairs) < 2:
                return replace(self.fit_to_window(question, contexts[:1], room), truncated=True)
        ids = [token for part in (*(ids for _, ids in pairs), []) for token in (*self.start, *part, *asked)]
        return FittedPrompt(question, tuple(ids), tuple(text for text, _ in pairs), truncated)

    def shortened(
        self, contexts: Sequence[str], documents: Sequence[list[int]], left: int
    ) -> list[tuple[str, list[int]]]:
        """The texts that fit into `left` tokens, the last one possibly cut, with their ids.

        `documents` are the ids of all `contexts`.
        """
        fitting = []
        for text, document in zip(contexts, documents, strict=True):
            text = text.strip()
            if not text:
                continue
            if len(document) > left:
                text = self._beginning(text, left)
                if text.strip():
                    fitting.append((text, self.document(text)))
                break
            fitting.append((text, document))
            left -= len(document)
        return fitting

    def _beginning(self, text: str, room: int) -> str:
        """The longest beginning of a text whose document has at most `room` tokens."""
        ids = self.texts.ids(text)
        for length in range(min(len(ids), room), 0, -1):
            cut: str = self.tokenizer.decode(ids[:length]).rstrip("\N{REPLACEMENT CHARACTER}")
            # Tokenized again, the cut text may have one token more.
            if len(self.document(cut)) <= room:
                return cut
        return ""


# Documents that are read in parallel: each one with the question, and none sees another.
#
# Several documents in a row are a longer text than a small LM was trained on, and it mixes up their contents. Here each
# document is in its own prompt, `d_i + x`, at the positions that it would have alone. Then come `x`, which sees all of
# them, and the answer, as in Fusion-in-Decoder (Izacard and Grave, 2021, "Leveraging Passage Retrieval with Generative
# Models for Open Domain Question Answering") and Parallel Context Windows (Ratner et al., 2023). So any number of
# documents takes only the positions of the longest one.


# Segment of the tokens of a memory's first slot, if they come before a prompt; the other slots have the next numbers.
MEMORY = 1_000_000


def segments_of(ids: Sequence[int], start: Sequence[int]) -> list[int]:
    """The segment of each token of a prompt, as `mac_rag.lm.prefix_lm.prefix_mask` takes them.

    Args:
        ids: token ids of a prompt; a prompt with documents in parallel consists of several prompts in a row.
        start: the ids that begin a prompt, at least one; they occur nowhere else.

    Returns:
        1 for the tokens of the last prompt; -1, -2 and so on for those of the prompts before it.
    """
    places = [place for place, token in enumerate(ids) if token == start[0]]
    if len(places) < 2:
        return [1] * len(ids)
    ends = [*places[1:], len(ids)]
    lengths = [end - begin for begin, end in zip([0, *ends], ends)]  # ids before the first start belong to its prompt
    numbers = [*range(-1, -len(lengths), -1), 1]
    return [number for number, length in zip(numbers, lengths, strict=True) for _ in range(length)]


def positions_of(segment_ids: Sequence[int]) -> list[int]:
    """The position of each token, given the segments: parallel ones begin at 0, the others after the longest.

    Examples:
        >>> positions_of([-1, -1, -1, -2, -2, 1, 1])
        [0, 1, 2, 0, 1, 3, 4]
    """
    positions: list[int] = []
    place, longest, last = 0, 0, None
    for segment in segment_ids:
        if segment != last and (last is None or _parallel(last)):
            place = 0 if _parallel(segment) else longest
        positions.append(place)
        place += 1
        longest, last = max(longest, place), segment
    return positions


def _parallel(segment: int) -> bool:
    return segment < 0 or segment >= MEMORY


def slot_segments(slots: int, length: int) -> list[int]:
    """The segments of `length` memory tokens before a prompt, divided evenly among `slots` slots."""
    return [MEMORY + slot for slot in range(slots) for _ in range(length // slots)]
