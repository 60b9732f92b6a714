"""Extractive decoding: an answer is a span of the texts in front of its question, or one of a few fixed answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mac_rag.lm.text_tokenizer import TextTokenizer

_NO_TOKEN = -1


# In front of tokens that begin a word, or go on with one, in the vocabularies of BPE, SentencePiece and WordPiece.
_WORD_MARKS = "Ġ▁#"


def numeral_tokens(tokenizer: Any) -> list[int]:
    """Ids of a tokenizer's tokens that are digits only."""
    return [number for token, number in tokenizer.get_vocab().items() if token.strip(_WORD_MARKS).isdecimal()]


@dataclass(frozen=True)
class SpanSource:
    """Token ids from which an answer may copy a span.

    Attributes:
        ids: token ids of a text, or of a fixed answer.
        starts: for each token, True if a span may begin with it.
        stops: for each token, True if a span may end with it.
    """

    ids: tuple[int, ...]
    starts: tuple[bool, ...]
    stops: tuple[bool, ...]

    @classmethod
    def of_text(cls, text: str, tokenizer: TextTokenizer) -> SpanSource:
        """A text, whose spans are whole words: they begin and end where no letters or digits are torn apart."""
        ids, covered = tokenizer.ids_and_spans(text)
        # Several tokens may share a character, of which they are the bytes.
        before = [0, *(end for _, end in covered)]
        behind = [*(first for first, _ in covered), len(text)]
        starts = [first >= last and not _inside_word(text, first) for (first, _), last in zip(covered, before)]
        stops = [
            end <= then and not _inside_word(text, end) and not text[first:end].isspace()
            for (first, end), then in zip(covered, behind[1:])
        ]
        return cls(tuple(ids), tuple(starts), tuple(stops))

    @classmethod
    def whole(cls, ids: Sequence[int]) -> SpanSource:
        """A fixed answer, of which no part is an answer."""
        places = range(len(ids))
        return cls(tuple(ids), tuple(i == 0 for i in places), tuple(i == len(ids) - 1 for i in places))


def _inside_word(text: str, place: int) -> bool:
    """True if letters or digits stand on both sides of a place in a text."""
    return 0 < place < len(text) and text[place - 1].isalnum() and text[place].isalnum()


class ExtractiveDecoding(LogitsProcessor):
    """Leaves only the tokens with which an answer stays a span of its sources.

    An answer may end where a span may stop. Rows without sources are decoded freely, except for what hardly any span
    says: the same token twice in a row, or the same two tokens again. Numerals may repeat, as in 1,000,000.

    An LM with memory is free: memory tokens hold no text, and they know more documents than those in front of the
    question. So of max-rule ensemble decoding only the LM without memory is bound to the sources. Once a token of the
    memory has won that no source goes on with, both are free.

    Examples:
        >>> text = SpanSource((5, 6, 7), starts=(True, True, False), stops=(True, False, True))
        >>> spans = ExtractiveDecoding([[text]], prompt_length=1, end_tokens=[2], numerals=[])
        >>> def allowed(*ids: int) -> list[int]:
        ...     return spans(torch.tensor([ids]), torch.zeros(1, 9)).isfinite().nonzero()[:, 1].tolist()
        >>> allowed(1), allowed(1, 6), allowed(1, 5), allowed(1, 6, 7)
        ([5, 6], [7], [2, 6], [2])

    Args:
        sources: for each of B rows what an answer may copy; none for a row that is free.
        prompt_length: tokens of `input_ids` in front of the answer.
        end_tokens: ids of the tokens that end an answer.
        numerals: ids of tokens of digits.
        halves: True if the rows are followed by the same ones without memory, which alone are bound.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[SpanSource]],
        *,
        prompt_length: int,
        end_tokens: Sequence[int],
        numerals: Sequence[int],
        halves: bool = False,
    ) -> None:
        # Each source is followed by one place without a token, which no answer goes beyond.
        longest = max(sum(len(source.ids) + 1 for source in row) for row in sources) or 1
        self._tokens = torch.full((len(sources), longest), _NO_TOKEN)
        self._starts = torch.zeros(self._tokens.shape, dtype=torch.bool)
        self._stops = torch.zeros_like(self._starts)
        for number, row in enumerate(sources):
            place = 0
            for source in row:
                part = slice(place, place + len(source.ids))
                self._tokens[number, part] = torch.tensor(source.ids, dtype=torch.int64)
                self._starts[number, part] = torch.tensor(source.starts, dtype=torch.bool)
                self._stops[number, part] = torch.tensor(source.stops, dtype=torch.bool)
                place = part.stop + 1
        self._prompt_length = prompt_length
        self._end_tokens = list(end_tokens)
        self._unbarred = [*end_tokens, *numerals]
        self._halves = halves

    def of(self, rows: Tensor) -> ExtractiveDecoding:
        """The decoding of some of the B rows, by their numbers."""
        part = object.__new__(ExtractiveDecoding)
        part.__dict__.update(self.__dict__)
        rows = rows.to(self._tokens.device)
        part._tokens, part._starts, part._stops = self._tokens[rows], self._starts[rows], self._stops[rows]
        return part

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[N, vocabulary]`, `-inf` for tokens that may not come next.

        Args:
            input_ids: `[N, L]`, prompts and answers so far. N is B times the beams, and twice that with `halves`.
            scores: `[N, vocabulary]`, logits or log-probabilities.
        """
        generated = input_ids[:, self._prompt_length :]
        if not self._halves:
            bound, matched = self._spans(generated, scores)
            free = self._without_repetition(generated, scores)
            return torch.where(matched[:, None], bound, free)
        half = len(scores) // 2
        with_memory = self._without_repetition(generated[:half], scores[:half])
        bound, matched = self._spans(generated[half:], scores[half:])
        free = self._without_repetition(generated[half:], scores[half:])
        return torch.cat([with_memory, torch.where(matched[:, None], bound, free)])

    def _spans(self, generated: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the tokens that go on with a span, and for each row True if the answer so far begins one."""
        device = scores.device
        tokens, starts, stops = (part.to(device) for part in (self._tokens, self._starts, self._stops))
        owner = torch.arange(len(scores), device=device) // (len(scores) // len(tokens))
        length = generated.shape[1]
        # Places where a span that equals the answer so far may begin.
        begins = starts[owner]
        if length:
            begins &= tokens[owner] == generated[:, :1]
        rows, places = begins.nonzero(as_tuple=True)
        for step in range(1, length):
            same = tokens[owner[rows], places + step] == generated[rows, step]
            rows, places = rows[same], places[same]
        allowed = torch.zeros(scores.shape, dtype=torch.bool, device=device)
        following = tokens[owner[rows], places + length]
        goes_on = following != _NO_TOKEN
        allowed[rows[goes_on], following[goes_on]] = True
        if length:
            stopping = rows[stops[owner[rows], places + length - 1]]
            for token in self._end_tokens:
                allowed[stopping, token] = True
        matched = torch.zeros(len(scores), dtype=torch.bool, device=device)
        matched[rows] = True
        return scores.masked_fill(~allowed, -torch.inf), matched

    def _without_repetition(self, generated: Tensor, scores: Tensor) -> Tensor:
        """Scores without the last token, and without what came behind it before; numerals and end tokens stay."""
        length = generated.shape[1]
        if not length:
            return scores
        last = generated[:, -1:]
        # Where the last token stood before, the token behind it; elsewhere the last token itself.
        behind = torch.where(generated[:, :-1] == last, generated[:, 1:], last)
        repeated = torch.cat([last, behind], 1)
        barred = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(1, repeated, True)
        barred[:, self._unbarred] = False
        return scores.masked_fill(barred, -torch.inf)
