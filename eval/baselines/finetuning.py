"""Online fine-tuning: the LM is updated on the stream, document by document, and then answers.

The methods differ in the weight of each token in the loss: all alike (Uniform), names, dates and numbers alone (Salient
Spans), or weights by a trained network (`eval.baselines.camels`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from eval.harness.published import answers_to
from eval.harness.scales import Protocol
from eval.harness.systems import System
from mac_rag.data.types import Document, Question
from mac_rag.errors import DocumentError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.loading import require_gradients
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.lm.text_tokenizer import Span
from mac_rag.progress import progress_bar
from pipelines.corpora.salient_spans import rule_spans
from pipelines.tasks.open_book import mean_scores

if TYPE_CHECKING:
    from spacy.language import Language

RULES = "rules for names, dates and numbers"


@dataclass(frozen=True)
class Passage:
    """A document, or a part of one, as the LM reads it.

    Attributes:
        ids: token ids `[L]`, with the tokens that the tokenizer puts before a text.
        text: the text of the whole document.
        spans: the characters of `text` that each token covers; an empty span for a token that is not text.
    """

    ids: Tensor
    text: str
    spans: tuple[Span, ...]


def passages(prompts: PromptEncoder, text: str, window: int, device: torch.device | str = "cpu") -> Iterator[Passage]:
    """Yields a document as passages of at most `window` tokens."""
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
        weights: `[L]`; that of the first token, which is not predicted, is not used.
    """
    losses = functional.cross_entropy(at_least_single(logits[:-1]), ids[1:], reduction="none")
    return (weights[1:] * losses).mean()


def at_least_single(values: Tensor) -> Tensor:
    """Converts half precision to single, because half is not enough for a loss; leaves double as it is."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def spacy_spans(pipeline: Language) -> Callable[[str], Sequence[Span]]:
    """A function that finds the named entities of a text with a spaCy pipeline."""
    return lambda text: [(entity.start_char, entity.end_char) for entity in pipeline(text).ents]


def salient_spans() -> SalientSpanWeights:
    """Weights by an installed English spaCy pipeline, or else by rules; the setting `spans` names which."""
    name = _pipeline()
    if name is None:
        return SalientSpanWeights(rule_spans, RULES)
    import spacy

    return SalientSpanWeights(spacy_spans(spacy.load(name)), f"spaCy {name}")


def _pipeline() -> str | None:
    """Name of an installed English pipeline, preferably the published small one; None without any."""
    english = sorted(point.name for point in entry_points(group="spacy_models") if point.name.startswith("en_"))
    return "en_core_web_sm" if "en_core_web_sm" in english else next(iter(english), None)


class FineTuning(System):
    """A copy of an LM, tuned on questions, that takes one step of Adam on each document, in the order of the stream.

    There is no dropout, so equal streams give equal LMs.

    Args:
        lora_rank: rank of the low-rank updates that are trained; None updates all weights.

    Raises:
        ConfigError: for a quantised LM without `lora_rank`: its weights cannot be updated.
        QuantizationError: for a 4-bit LM on a CPU, which has no gradients through it.
    """

    def __init__(
        self,
        base_lm: BaseLM,
        weighting: TokenWeighting,
        learning_rate: float,
        *,
        lora_rank: int | None = None,
        max_new_tokens: int = 16,
        batch_size: int = 32,
        protocol: Protocol = "strict",
    ) -> None:
        self.name = weighting.name
        self.settings = {"learning_rate": learning_rate, **weighting.settings}
        lm = copy.deepcopy(base_lm.model)
        if lora_rank is not None:
            self.settings |= {"lora_rank": lora_rank}
            if getattr(lm, "is_quantized", False):
                require_gradients("nf4", base_lm.device)
        make_trainable(lm, lora_rank, merging=False)
        self.lm = BaseLM(lm.eval(), base_lm.tokenizer, base_lm.prompts.format)
        self.networks = [self.lm, *weighting.networks]
        self._weighting = weighting
        updated = [weight for weight in self.lm.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.Adam(updated, lr=learning_rate)
        self._max_new_tokens, self._protocol = max_new_tokens, protocol
        self._batch_size = batch_size

    def adapt(self, documents: Sequence[Document]) -> None:
        window, device = self.lm.context_window, self.lm.device
        with progress_bar(self.name, len(documents)) as bar:
            for document in documents:
                for passage in passages(self.lm.prompts, document.text, window, device):
                    weights = self._weighting.weights(passage)
                    logits = self.lm.model(input_ids=passage.ids[None], use_cache=False).logits[0]
                    self._optimizer.zero_grad()
                    weighted_loss(logits, passage.ids, weights).backward()
                    self._optimizer.step()
                bar.advance()

    def answer(self, questions: Sequence[str]) -> list[str]:
        prompts = [self.lm.prompts.prompt(question) for question in questions]
        limit = self._max_new_tokens
        return answers_to(self.lm, prompts, self._protocol, max_new_tokens=limit, batch_size=self._batch_size)


def search_learning_rate(
    make: Callable[[float], System],
    rates: Sequence[float],
    documents: Sequence[Document],
    questions: Sequence[Question],
) -> tuple[float, dict[float, float]]:
    """Searches the learning rate: for each one, adapts to a validation stream and asks about it (appendix A).

    Returns:
        The rate with the highest mean F1, the smallest of equals; and the F1 of each rate.
    """
    f1_by_rate = {}
    for rate in sorted(rates):
        system = make(rate)
        system.adapt(documents)
        answers = system.answer([question.question for question in questions])
        f1_by_rate[rate] = mean_scores(answers, questions)["f1"]
        del system  # before another LM with gradients and moments is made
    return max(f1_by_rate, key=lambda rate: f1_by_rate[rate]), f1_by_rate
