"""Token weights of online fine-tuning: the weight of each token of a document in the loss that updates the LM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.errors import DocumentError
from mac_rag.lm.text_tokenizer import Span

if TYPE_CHECKING:
    from mac_rag.lm.prompt import PromptEncoder


@dataclass(frozen=True)
class Passage:
    """A document, or a part of one, as the LM reads it.

    Attributes:
        ids: token ids `[L]`, with the tokens that the tokenizer puts in front of a text.
        text: the text of the whole document.
        spans: the characters of `text` that each token covers; an empty span for a token that is not text.
    """

    ids: Tensor
    text: str
    spans: tuple[Span, ...]


def passages(prompts: PromptEncoder, text: str, window: int, device: torch.device | str = "cpu") -> Iterator[Passage]:
    """A document as one passage, or as several where it is longer than the window.

    Args:
        prompts: writes and tokenizes the document.
        text: the document.
        window: maximum tokens of a passage.
        device: device of the token ids.

    Raises:
        DocumentError: for an empty document.
    """
    if not text.strip():
        raise DocumentError(f"a document must not be empty, got {text!r:.80}")
    written = prompts.written_document(text)
    read, covered = prompts.texts.ids_and_spans(written)
    room = window - len(prompts.start)
    for first in range(0, len(read), room):
        ids = [*prompts.start, *read[first : first + room]]
        spans = [(0, 0)] * len(prompts.start) + covered[first : first + room]
        yield Passage(torch.tensor(ids, device=device), written, tuple(spans))


class TokenWeighting(ABC):
    """Weights of the tokens of a document.

    Attributes:
        name: name of the fine-tuning that uses these weights.
        settings: settings of the weights in the result.
        networks: networks that compute them.
    """

    name: str
    settings: Mapping[str, str | int | float] = {}
    networks: Sequence[nn.Module] = ()

    @abstractmethod
    def weights(self, passage: Passage) -> Tensor:
        """The weights of a passage's tokens, `[L]`."""


class UniformWeights(TokenWeighting):
    """All tokens have weight 1."""

    name = "Uniform"

    def weights(self, passage: Passage) -> Tensor:
        return torch.ones(len(passage.ids), device=passage.ids.device)


class SalientSpanWeights(TokenWeighting):
    """Weight 1 for the tokens of names, dates and numbers, and 0 for others (Guu et al., 2020).

    Args:
        find: finds the salient spans of a text.
        finder: description of `find` in the result.
    """

    name = "Salient Spans"

    def __init__(self, find: Callable[[str], Sequence[Span]], finder: str) -> None:
        self._find = find
        self.settings = {"spans": finder}

    def weights(self, passage: Passage) -> Tensor:
        salient = [False] * (len(passage.text) + 1)
        for first, end in self._find(passage.text):
            salient[first:end] = [True] * (end - first)
        covered = [float(any(salient[first:end])) for first, end in passage.spans]
        return torch.tensor(covered, device=passage.ids.device)


def weighted_loss(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The mean of weight times negative log-likelihood, in nats, over all predicted tokens.

    Args:
        logits: predictions of the next token, `[L, vocabulary]`.
        ids: token ids, `[L]`.
        weights: token weights, `[L]`; the first token is not predicted, so its weight is not used.
    """
    losses = functional.cross_entropy(at_least_single(logits[:-1]), ids[1:], reduction="none")
    return (weights[1:] * losses).mean()


def at_least_single(values: Tensor) -> Tensor:
    """The values in single precision, or in double if they are double; half precision is not enough for a loss."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
