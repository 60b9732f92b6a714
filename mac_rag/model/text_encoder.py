"""A text encoder: a tokenizer and an amortization network, from texts to memory tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mac_rag.data.characters import check_text, shown
from mac_rag.errors import DocumentError
from mac_rag.lm.batching import length_buckets, pad_rows, similar_lengths
from mac_rag.lm.text_tokenizer import text_tokenizer
from mac_rag.model.splitting import Chunk, split
from mac_rag.nn.amortization import AmortizationNetwork
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.unpadded_bert import Reading, forget, last_states, last_states_without_gradients

_LENGTH_RATIO = 1.5  # largest ratio of the longest to the shortest text of a batch
_SHORT = 64  # tokens of a text; a call of the network costs more than the padding of texts that are no longer


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
        """Sets the training mode of the network, and forgets what was made of its weights for `encode`."""
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
        return self._within_limit(self._tokenized(text.strip()), text.strip())

    def _tokenized(self, text: str) -> list[int]:
        return self._texts.ids(text, special=True)

    def _within_limit(self, ids: list[int], text: str) -> list[int]:
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
        encoded: MemoryTokens = self.network(*pad_rows(rows, 0, self.device), read)  # masked, so any token may pad
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

        A longer text is cut at sentence ends, or else between words, or else within a word; see
        `mac_rag.model.splitting`. Nothing is lost: the rows hold every character of the text in order, but for spaces
        at the cuts. A text within the limit is tokenized once, a longer one about twice.

        Args:
            text: the document.
            whole: raise an error for a text beyond the limit, instead of cutting it.
            advance: called with the number of characters that are done since its last call; all calls add up to the
                length of the text.

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
