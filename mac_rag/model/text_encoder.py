"""A text encoder: a tokenizer and an amortization network, from texts to memory tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mac_rag.errors import DocumentError
from mac_rag.lm.batching import length_buckets, pad_rows, similar_lengths
from mac_rag.lm.text_tokenizer import text_tokenizer
from mac_rag.nn.amortization import AmortizationNetwork
from mac_rag.nn.memory_tokens import MemoryTokens

_LENGTH_RATIO = 1.5  # largest ratio of the longest to the shortest text of a batch


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

    @property
    def device(self) -> torch.device:
        return self.network.queries.device

    def ids(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            DocumentError: for anything but a text with at least one visible character, and for a text beyond the limit.
        """
        _check_text(text)
        return self._within_limit(self._tokenized(text.strip()), text.strip())

    def _tokenized(self, text: str) -> list[int]:
        return self._texts.ids(text, special=True)

    def _within_limit(self, ids: list[int], text: str) -> list[int]:
        if len(ids) > self.max_tokens:
            raise DocumentError(
                f"a text of {len(ids)} tokens is longer than the limit of {self.max_tokens}; "
                f"split it first (it begins {text[:60]!r})"
            )
        return ids

    def forward(self, rows: Sequence[Sequence[int]]) -> MemoryTokens:
        """Encodes token ids of K texts to their memory tokens; texts of similar length share a batch."""
        groups = similar_lengths([len(row) for row in rows], _LENGTH_RATIO)
        encoded = MemoryTokens.cat([self._encode_batch([rows[i] for i in group]) for group in groups])
        places = torch.tensor([i for group in groups for i in group], device=self.device)
        return encoded[places.argsort()]

    def _encode_batch(self, rows: Sequence[Sequence[int]]) -> MemoryTokens:
        encoded: MemoryTokens = self.network(*pad_rows(rows, 0, self.device))  # masked, so any token may pad
        return encoded

    @torch.no_grad()
    def encode(self, rows: Sequence[Sequence[int]], batch_tokens: int, advance: Any = None) -> MemoryTokens:
        """Encodes any number of texts in batches of similar length, without gradients.

        Args:
            rows: token ids of each text.
            batch_tokens: tokens of one batch, padding included.
            advance: called after each batch with its number of texts.

        Returns:
            Memory tokens of K texts in float32, in the order of `rows`.

        Raises:
            DocumentError: without texts.
        """
        tokens = self.network.tokens
        result: MemoryTokens | None = None
        for bucket in length_buckets([len(row) + tokens for row in rows], batch_tokens):
            encoded = self([rows[i] for i in bucket]).to(torch.float32)
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
        return [chunk for chunk, _ in self._chunks(text)]

    def plan(self, text: str, *, whole: bool = False) -> list[list[int]]:
        """Token ids of a text, as rows that the network reads one by one: a single row for a text within the limit.

        A longer text is cut at sentence ends, or else between words. Nothing is lost: the rows hold every word of the
        text in order. A text within the limit is tokenized once, a longer one once as a whole and once in its chunks.

        Args:
            text: the document.
            whole: raise an error for a text beyond the limit, instead of cutting it.

        Raises:
            DocumentError: for anything but a text with at least one visible character; for a single word beyond the
                limit; with `whole`, for a text beyond it.
        """
        chunks = list(self._chunks(text))
        if whole and len(chunks) > 1:
            self._within_limit(self._tokenized(text.strip()), text.strip())
        return [ids for _, ids in chunks]

    def _chunks(self, text: str) -> Iterator[tuple[str, list[int]]]:
        """Chunks of a text, each with its token ids."""
        _check_text(text)
        text = text.strip()
        whole, spans = self._texts.ids_and_spans(text, special=True)
        if len(whole) <= self.max_tokens:
            yield text, whole
            return
        ends = [end for _, end in spans if end]
        special = len(whole) - len(ends)
        start = 0  # of the next chunk, in characters
        while start < len(text):
            budget = self.max_tokens - special
            while True:
                # A chunk may take more tokens alone than in its place in the text: then it has to be shorter.
                stop = self._cut(text, start, ends, budget)
                chunk = text[start:stop].strip()
                ids = self._tokenized(chunk)
                if len(ids) <= self.max_tokens:
                    break
                budget -= len(ids) - self.max_tokens
            yield chunk, ids
            start = stop + len(text[stop:]) - len(text[stop:].lstrip())

    def _cut(self, text: str, start: int, ends: Sequence[int], budget: int) -> int:
        """Where a chunk of at most `budget` tokens ends that begins at `start`; `ends` are the ends of all tokens."""
        first = bisect_right(ends, start)
        if len(ends) - first <= budget:
            return len(text)
        window = text[start : ends[first + budget - 1]] if budget > 0 else ""
        cut = max(window.rfind(mark) + 1 for mark in (". ", "! ", "? ", "\n"))
        if cut < len(window) // 2:  # no sentence ends in the second half: cut between words
            cut = window.rfind(" ")
        if cut <= 0:
            raise DocumentError(
                f"a single word is longer than the limit of {self.max_tokens} tokens: {text[start : start + 60]!r}"
            )
        return start + cut


def _check_text(text: object) -> None:
    """Refuses anything but a text with at least one visible character."""
    if not isinstance(text, str):
        raise DocumentError(f"expected a text, got {type(text).__name__}: {text!r:.80}")
    if not text.strip():
        raise DocumentError(f"a text must not be empty, got {text!r:.80}")
