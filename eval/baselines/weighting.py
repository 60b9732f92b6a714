"""Token weights of online fine-tuning: what each token of a document counts in the loss that the LM is updated by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.errors import DocumentError

if TYPE_CHECKING:
    from mac_rag.lm.prompt import PromptEncoder

Span = tuple[int, int]  # first character, and the one behind the last


@dataclass(frozen=True)
class Passage:
    """A document, or a part of one, as the LM reads it.

    Attributes:
        ids: token ids `[L]`, what the tokenizer puts in front of a text included.
        text: what the tokens stand for.
        spans: the characters of `text` that each token covers; an empty span for what is not text.
    """

    ids: Tensor
    text: str
    spans: tuple[Span, ...]


def passages(prompts: PromptEncoder, text: str, window: int, device: torch.device | str = "cpu") -> Iterator[Passage]:
    """A document as the LM is to be updated on it: in one part, or as many as the window asks for.

    Raises:
        DocumentError: for an empty document.
    """
    if not text.strip():
        raise DocumentError(f"a document must not be empty, got {text!r:.80}")
    written = prompts.format.document.replace("{document}", text.strip())
    encoded = prompts.tokenizer(written, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    room = window - len(prompts.start)
    for first in range(0, len(encoded.input_ids), room):
        ids = [*prompts.start, *encoded.input_ids[first : first + room]]
        spans = [(0, 0)] * len(prompts.start) + encoded.offset_mapping[first : first + room]
        yield Passage(torch.tensor(ids, device=device), written, tuple(spans))


class TokenWeighting(ABC):
    """Weights the tokens of a document.

    Attributes:
        name: of the fine-tuning that uses these weights.
        settings: what the result says about them.
        networks: what they come from.
    """

    name: str
    settings: Mapping[str, str | int | float] = {}
    networks: Sequence[nn.Module] = ()

    @abstractmethod
    def weights(self, passage: Passage) -> Tensor:
        """A weight for each token, `[L]`."""


class UniformWeights(TokenWeighting):
    """All tokens count alike."""

    name = "Uniform"

    def weights(self, passage: Passage) -> Tensor:
        return torch.ones(len(passage.ids), device=passage.ids.device)


class SalientSpanWeights(TokenWeighting):
    """Tokens of names, dates and numbers count, others do not (Guu et al., 2020).

    Args:
        find: gives the salient spans of a text.
        finder: what finds them, for the result.
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
    """The mean over all predicted tokens of weight times negative log-likelihood.

    Args:
        logits: `[L, vocabulary]`, the prediction behind each token.
        ids: `[L]`.
        weights: `[L]`; the first one has nothing to weigh.
    """
    losses = functional.cross_entropy(at_least_single(logits[:-1]), ids[1:], reduction="none")
    return (weights[1:] * losses).mean()


def at_least_single(values: Tensor) -> Tensor:
    """The values in single precision, or double where they are: half is not enough for a loss."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
