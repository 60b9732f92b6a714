"""A text encoder: a tokenizer and an amortization network, from texts to memory tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import regex
import torch
from torch import nn

from mac_rag.data.characters import check_text, shown
from mac_rag.errors import DocumentError
from mac_rag.lm.batching import length_buckets, pad_rows, similar_lengths
from mac_rag.lm.text_tokenizer import TextTokenizer, text_tokenizer
from mac_rag.nn.amortization import AmortizationNetwork
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.unpadded_bert import Reading, forget, last_states, last_states_without_gradients

_LENGTH_RATIO = 1.5  # largest ratio of the longest to the shortest text of a batch
_SHORT = 64  # tokens; texts up to this length share a batch: their padding costs less than another call


class TextEncoder(nn.Module):
    """g_amort for documents or g_input for questions.

    Examples:
        >>> from mac_rag import MACModel
        >>> encoder = MACModel.from_pretrained("mac-tiny").amortization
        >>> rows = encoder.plan("A storm has hit Wunville. " * 100)  # beyond the limit, so it becomes several rows
        >>> len(rows) > 1, max(map(len, rows)) <= encoder.max_tokens
        (True, True)
        >>> encoder.encode(rows[:2], batch_tokens=2048).tokens.shape
        torch.Size([2, 16, 128])

    Args:
        network: the amortization network.
        tokenizer: its backbone's tokenizer.
        max_tokens: largest number of tokens of a text; less if the backbone has fewer positions.
    """

    def __init__(self, network: AmortizationNetwork, tokenizer: Any, max_tokens: int) -> None:
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self._texts = text_tokenizer(tokenizer)
        # T5 has relative positions and no such limit.
        positions = getattr(network.backbone.config, "max_position_embeddings", None)
        self.max_tokens = min(max_tokens, positions - network.tokens) if positions else max_tokens

    def train(self, mode: bool = True) -> TextEncoder:
        """Sets the training mode of the network, and drops the copies of its weights that `encode` made."""
        forget(self)
        return super().train(mode)

    @property
    def device(self) -> torch.device:
        return self.network.queries.device

    def ids(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            DocumentError: for anything but a text with at least one visible character, and for a text beyond the limit.
        """
        check_text(text)
        text = text.strip()
        ids = self._texts.ids(text, special=True)
        if len(ids) > self.max_tokens:
            raise DocumentError(
                f"a text of {len(ids)} tokens is longer than the limit of {self.max_tokens}; "
                f"split it first (it begins {shown(text)})"
            )
        return ids

    def forward(self, rows: Sequence[Sequence[int]], read: Reading = last_states) -> MemoryTokens:
        """Encodes token ids of K texts to their memory tokens; texts that are short or of similar length share a batch.

        Args:
            rows: token ids of each text.
            read: see `AmortizationNetwork.forward`.
        """
        groups = similar_lengths([max(len(row), _SHORT) for row in rows], _LENGTH_RATIO)
        encoded = MemoryTokens.cat([self._encode_batch([rows[i] for i in group], read) for group in groups])
        places = torch.tensor([i for group in groups for i in group], device=self.device)
        return encoded[places.argsort()]

    def _encode_batch(self, rows: Sequence[Sequence[int]], read: Reading) -> MemoryTokens:
        encoded: MemoryTokens = self.network(*pad_rows(rows, 0, self.device), read)  # any token may pad: it is masked
        return encoded

    @torch.no_grad()
    def encode(self, rows: Sequence[Sequence[int]], batch_tokens: int, advance: Any = None) -> MemoryTokens:
        """Encodes any number of texts in batches of similar length, without gradients.

        Args:
            rows: token ids of each text.
            batch_tokens: number of tokens of one batch, padding included.
            advance: called after each batch with its number of texts.

        Returns:
            Memory tokens of K texts in float32, in the order of `rows`.

        Raises:
            DocumentError: without texts.
        """
        tokens = self.network.tokens
        result: MemoryTokens | None = None
        for bucket in length_buckets([len(row) + tokens for row in rows], batch_tokens):
            encoded = self([rows[i] for i in bucket], last_states_without_gradients).to(torch.float32)
            if result is None:
                result = encoded.new_empty(len(rows))
            result.put(bucket, encoded)
            if advance is not None:
                advance(len(bucket))
        if result is None:
            raise DocumentError("there are no texts to encode; give at least one")
        return result

    def split(self, text: str) -> list[str]:
        """The chunks of a text within the limit; see `plan`."""
        return [chunk.text for chunk in self._chunks(text)]

    def plan(
        self, text: str, *, whole: bool = False, advance: Callable[[int], object] | None = None
    ) -> list[list[int]]:
        """Token ids of a text, as rows that the network reads one by one: a single row for a text within the limit.

        A longer text is cut at sentence ends, or else between words, or else within a word; see `split`. Nothing is
        lost: the rows hold every character of the text in order, except spaces at the cuts. A text within the limit is
        tokenized once, a longer one about twice.

        Args:
            text: the document.
            whole: True raises an error for a text beyond the limit, instead of cutting it.
            advance: called with the number of characters done since its last call; all calls add up to the length of
                the text.

        Raises:
            DocumentError: for anything but a text with at least one visible character; with `whole`, for a text
                beyond the limit.
        """
        rows: list[list[int]] = []
        done = 0
        for chunk in self._chunks(text):
            if whole and len(chunk.text) < len(text.strip()):
                raise DocumentError(
                    f"a text of {len(text):,} characters is longer than the limit of {self.max_tokens} tokens; "
                    f"split it first (it begins {shown(text)})"
                )
            rows.append(chunk.ids)
            if advance is not None:
                advance(chunk.end - done)
                done = chunk.end
        if advance is not None:
            advance(len(text) - done)
        return rows

    def _chunks(self, text: str) -> Iterator[Chunk]:
        check_text(text)
        return split(text.strip(), self._texts, self.max_tokens)


# Splits a text into chunks that a network reads at once, in time proportional to the length of the text.
#
# The tokenizer reads one window of the text at a time. Tokens depend on their neighbours only within a word: WordPiece
# and byte-level BPE cut a text into words first, and the vocabularies of SentencePiece (BPE and Unigram) have no token
# that continues after a space. So between its first and its last space, a window has the tokens of the whole text, and
# only these are used. In a text without spaces, the tokens next to a window's edges may differ from those of the whole.
# Then a chunk ends at another of many good places, but never at a wrong one: each chunk is tokenized and measured by
# itself.


_SENTENCE_ENDS = (". ", "! ", "? ", "\n")
_SENTENCE_ENDS_WITHOUT_SPACE = "。！？"
_AT_ONCE = 16  # number of windows, and of chunks, that are tokenized at once
_CONTEXT = 256  # characters at both ends of a window whose tokens are not used
_NOT_SPACE = re.compile(r"\S")
_CHARACTER = regex.compile(r"\X")  # what a reader sees as one character, such as a letter with its accents


class Chunk(NamedTuple):
    """A part of a text.

    Attributes:
        text: the part, without spaces around it.
        ids: its token ids.
        end: index in the text after the chunk and the spaces that follow it.
    """

    text: str
    ids: list[int]
    end: int


def split(text: str, tokenizer: TextTokenizer, limit: int, *, window: int = 32) -> Iterator[Chunk]:
    """Yields the chunks of a text: the text itself if it is within the limit, otherwise chunks filled to the limit.

    A chunk ends after a sentence, if one ends in its second half, or else between words. A word that is longer than the
    limit is cut between two tokens, and never within a character.

    Args:
        text: a text without spaces around it.
        tokenizer: tokenizes it.
        limit: largest number of tokens of a chunk, including those that the tokenizer puts around a text.
        window: number of characters that the tokenizer reads at a time, per token of a chunk; it grows if a chunk needs
            more. English has four or five characters to a token.

    Raises:
        DocumentError: for a character beyond the limit.
    """
    tokens = _Tokens(text, tokenizer, window * limit)
    if tokens.are_within(limit):
        yield Chunk(text, tokens.ids, len(text))
        return
    whole = limit - tokens.special
    budget, start, together = whole, 0, _AT_ONCE
    while start < len(text):
        places = _places(text, start, tokens, budget, whole, together)
        if not places:
            raise DocumentError(
                f"a single character takes more than the {limit} tokens that are read at once; remove it "
                f"({shown(text[start : start + 1])} at index {start})"
            )
        parts = [text[first:stop].strip() for first, stop in places]
        together = min(2 * together, _AT_ONCE)
        for (_, stop), part, ids in zip(places, parts, tokenizer.batch(parts, special=True), strict=True):
            if len(ids) > limit:
                # A chunk may take more tokens alone than within the text: then it has to be shorter, and the chunks
                # after it begin elsewhere. If this happens once, it happens often in the same text.
                budget -= len(ids) - limit
                together = 1
                break
            start, budget = _next_start(text, stop), whole
            yield Chunk(part, ids, start)


def _places(text: str, start: int, tokens: _Tokens, first: int, others: int, at_most: int) -> list[tuple[int, int]]:
    """Begin and end index of each of the next chunks, by their tokens in the text.

    Args:
        text: the text.
        start: index of the first chunk's first character.
        tokens: the text's tokens. They are read as far as the first chunk needs; other chunks use what was read.
        first: largest number of tokens of the first chunk. Without room for a single character there are no chunks.
        others: largest number of tokens of the chunks after it.
        at_most: largest number of chunks.
    """
    places: list[tuple[int, int]] = []
    budget = first
    while start < len(text) and len(places) < at_most:
        if places and not tokens.holds(start, budget + 1):
            break
        stop = _cut(text, start, tokens.ends_after(start, budget + 1), budget)
        if stop == start:
            break
        places.append((start, stop))
        start, budget = _next_start(text, stop), others
    return places


def _next_start(text: str, stop: int) -> int:
    """Index at which the chunk after one that ends at `stop` begins."""
    following = _NOT_SPACE.search(text, stop)
    return len(text) if following is None else following.start()


class _Tokens:
    """The ends of a text's tokens, read window by window.

    Attributes:
        ids: the token ids of the text, if one window holds all of it.
        special: number of tokens that the tokenizer puts around a text.
    """

    def __init__(self, text: str, tokenizer: TextTokenizer, window: int) -> None:
        self.ids: list[int] = []
        self.special = 0
        self._text = text
        self._tokenizer = tokenizer
        self._window = window
        self._ends: list[int] = []
        self._read(0, window)

    def are_within(self, limit: int) -> bool:
        """True if the whole text has at most `limit` tokens; `ids` are then set."""
        self.ends_after(0, limit - self.special + 1)
        return 0 < len(self.ids) <= limit

    def ends_after(self, start: int, count: int) -> Sequence[int]:
        """End indices of the first `count` tokens after `start`; fewer only at the end of the text."""
        size = 2 * self._window if start == self._start else self._window
        while not self.holds(start, count):
            self._read(start, size)
            size *= 2
        first = bisect_right(self._ends, start)
        return self._ends[first : first + max(0, count)]

    def holds(self, start: int, count: int) -> bool:
        """True if `ends_after` needs to read nothing; `start` must not be before that of an earlier call."""
        return self._at_end or len(self._ends) - bisect_right(self._ends, start) >= count

    def _read(self, start: int, size: int) -> None:
        """Tokenizes windows of the text: the first from a little before `start`, then one after another."""
        text, read = self._text, start
        parts: list[str] = []
        bounds: list[tuple[int, int]] = []  # where each window begins, and up to where its tokens are used
        while not parts or (len(parts) < _AT_ONCE and read < len(text)):
            begin = _space_before(text, read - _CONTEXT // 8, read - _CONTEXT)
            begin = max(0, read - _CONTEXT) if begin is None else begin
            stop = min(begin + size, len(text))
            used = len(text) if stop == len(text) else _space_before(text, stop - 1, stop - size // 2)
            used = stop - _CONTEXT if used is None else used
            parts.append(text[begin:stop])
            bounds.append((begin, used))
            if used <= read:  # the window is too small; the next call reads larger ones
                break
            read = used
        # Tokens that the tokenizer puts around a text end at 0. The window at the beginning of the text counts them.
        tokenized = self._tokenizer.batch_with_spans(parts, special=True)
        if not start:
            self.special = sum(not end for _, end in tokenized[0][1])
        self._start, self._at_end = start, bounds[-1][1] == len(text)
        self.ids = tokenized[0][0] if parts == [text] else []
        self._ends = []
        done = 0
        for (begin, used), (_, spans) in zip(bounds, tokenized, strict=True):
            self._ends += [begin + end for _, end in spans if end and done < begin + end <= used]
            done = used


def _space_before(text: str, last: int, first: int) -> int | None:
    """Index at which the last run of spaces in `text[first:last]` begins; None if none begins there."""
    for index in range(last - 1, max(0, first), -1):
        if text[index].isspace() and not text[index - 1].isspace():
            return index
    return None


def _cut(text: str, start: int, ends: Sequence[int], budget: int) -> int:
    """End index of a chunk of at most `budget` tokens that begins at `start`; `start` itself if none fits.

    Args:
        text: the text.
        start: index of the chunk's first character.
        ends: end indices of the first tokens after `start`: one more than `budget`, if there are as many.
        budget: largest number of tokens.
    """
    if len(ends) <= budget:
        return len(text)
    window = text[start : ends[budget - 1]] if budget > 0 else ""
    cut = max(window.rfind(mark) + 1 for mark in _SENTENCE_ENDS)
    if cut < len(window) // 2:  # no sentence ends in the second half: cut between words
        cut = window.rfind(" ")
    return start + cut if cut > 0 else _cut_without_spaces(text, start, ends[: max(0, budget)])


def _cut_without_spaces(text: str, start: int, ends: Sequence[int]) -> int:
    """As `_cut`, for a text without a space before the last of `ends`."""
    last = ends[-1] if ends else start
    space = _space_before(text, last, start)
    if space is not None:  # a tab, or any other kind of space
        return space
    window = text[start:last]
    cut = max(window.rfind(mark) + 1 for mark in _SENTENCE_ENDS_WITHOUT_SPACE)
    if cut >= len(window) // 2 > 0:
        return start + cut
    if window.isascii() and "\r" not in window and text[last : last + 1].isascii():
        return last  # each character stands alone, and each token ends after one
    characters = [match.end() for match in _CHARACTER.finditer(text, start, last + 1) if match.end() <= last]
    between = set(characters)
    at_token = next((end for end in reversed(ends) if end in between), None)
    if at_token is not None:
        return at_token
    return characters[-1] if characters else last  # a character with very many accents is cut between two of them
