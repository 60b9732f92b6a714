"""How the next token of an answer is chosen: sampling, max rule, abstention, and spans copied from texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mac_rag.data.types import Token
from mac_rag.errors import ConfigError
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.lm.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class Sampling:
    """How an answer is decoded; the default is greedy.

    Examples:
        >>> from mac_rag import MACModel
        >>> model, warm = MACModel.from_pretrained("mac-tiny"), Sampling(temperature=0.8, top_p=0.9, seed=7)
        >>> model.generate(["Who?"], sampling=warm) == model.generate(["Who?"], sampling=warm)
        True

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_p: draws from the fewest most probable tokens whose probabilities sum to at least this.
        seed: random seed of each answer. Equal seeds give equal answers to equal prompts, whatever else is in the
            batch, up to rounding of the logits. None draws new seeds each time, from torch's default generator.
        stop: strings that end an answer. The answer does not contain them.
        top_k: draws from at most so many of the most probable tokens; 0 for all.
        min_p: draws from tokens that are at least this times as probable as the most probable one.
        presence_penalty: is taken from the logits of tokens that the answer has already.
        frequency_penalty: is taken from them for each time that the answer has them.
        bias: token ids, and what is added to their logits.
        log_probabilities: most alternatives to record with the log-probability of each token, see `Token`; None to
            record neither.

    Raises:
        ConfigError: for a value outside of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    log_probabilities: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; give a number of at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; give a number above 0 and at most 1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ConfigError(f"stop is {self.stop!r}; give a tuple of strings that are not empty")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; give a number of tokens, or 0 for all")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; give a number from 0 to 1")

    def until_stop(self, text: str) -> tuple[str, bool]:
        """The text before the first stop string, and True if there is one."""
        places = [place for place in (text.find(string) for string in self.stop) if place >= 0]
        return (text[: min(places)], True) if places else (text, False)

    def settled(self, text: str) -> str:
        """The part of an unfinished text that no stop string can still remove: without an end that may begin one."""
        begun = (
            length
            for string in self.stop
            for length in range(min(len(string) - 1, len(text)), 0, -1)
            if text.endswith(string[:length])
        )
        return text[: len(text) - max(begun, default=0)]


GREEDY = Sampling()


class TokenChoice:
    """Chooses the next token of each of B rows.

    Each row draws from its own generator, so that rows do not depend on each other.

    Args:
        sampling: how to choose.
        rows: B.
    """

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self._sampling = sampling
        self._generators: list[torch.Generator] = []
        if sampling.temperature > 0:
            drawn = torch.randint(2**62, (rows,)).tolist() if sampling.seed is None else [sampling.seed] * rows
            self._generators = [torch.Generator().manual_seed(seed) for seed in drawn]

    def of(self, rows: Tensor) -> TokenChoice:
        """The choice for a subset of the rows. `rows`: their indices; each continues with its own generator."""
        chosen = TokenChoice(self._sampling, 0)
        chosen._generators = [self._generators[row] for row in rows.tolist()] if self._generators else []
        return chosen

    def __call__(self, logits: Tensor, answers: Tensor) -> Tensor:
        """Tokens `[N]` from logits `[N, vocabulary]`, after answers `[N, L]`.

        N is B, or 2B if the second half equals the first.
        """
        logits = self._changed(logits, answers)
        if not self._generators:
            return logits.float().argmax(-1)  # in bf16 it takes five times as long
        rows = len(self._generators)
        probabilities = (logits[:rows].float() / self._sampling.temperature).softmax(-1)
        descending, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        mass = descending.double().cumsum(-1)
        kept = mass - descending < self._sampling.top_p  # always includes the most probable token
        if self._sampling.top_k:
            kept[:, self._sampling.top_k :] = False
        if self._sampling.min_p:
            kept &= descending >= self._sampling.min_p * descending[:, :1]
        total = (descending * kept).double().sum(-1, keepdim=True)
        uniform = torch.cat([torch.rand(1, dtype=torch.double, generator=part) for part in self._generators])
        place = (mass < uniform.to(mass.device)[:, None] * total).sum(-1, keepdim=True)
        last_kept = kept.sum(-1, keepdim=True) - 1
        return tokens.gather(-1, torch.minimum(place, last_kept))[:, 0].repeat(len(logits) // rows)

    def _changed(self, logits: Tensor, answers: Tensor) -> Tensor:
        """The logits with bias and penalties."""
        sampling = self._sampling
        if sampling.bias:
            ids, bias = zip(*sampling.bias)
            logits = logits.index_add(
                1, torch.tensor(ids, device=logits.device), logits.new_tensor([bias] * len(logits))
            )
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = torch.zeros_like(logits).scatter_add_(1, answers, torch.ones_like(answers, dtype=logits.dtype))
            logits = logits - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
        return logits


def log_probabilities(logits: Tensor, tokens: Tensor, most: int) -> list[Token]:
    """Tokens `[B]` with their log-probabilities and at most so many alternatives, from logits `[B, vocabulary]`."""
    scores = logits.float().log_softmax(-1)
    chosen = scores.gather(-1, tokens[:, None])[:, 0].tolist()
    best, ids = scores.topk(min(most, scores.shape[-1]))
    return [
        Token(token, score, tuple((one, value) for one, value in zip(row, values) if value > -math.inf))
        for token, score, row, values in zip(tokens.tolist(), chosen, ids.tolist(), best.tolist())
    ]


class MaxRuleEnsemble(LogitsProcessor):
    """Combines two next-token distributions: `max(lambda p(. | d, x; phi*), (1 - lambda) p(. | d, x))`.

    This is the max rule of Kittler et al. (1998, "On Combining Classifiers"): for each token the more confident of two
    models counts. If the retrieved text holds the answer, that is often the LM alone; if it does not, the LM with
    memory. Nothing has to decide which case holds.

    Args:
        weights: lambda of each of B questions, from 0 (the LM alone) to 1 (the LM with memory).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = torch.tensor(weights, dtype=torch.float32)

    def of(self, questions: Tensor) -> MaxRuleEnsemble:
        """The ensemble of a subset of the B questions, by their indices."""
        return MaxRuleEnsemble(self._weights[questions.cpu()].tolist())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities `[2 B, vocabulary]`, equal in both halves.

        Args:
            input_ids: not used.
            scores: logits `[2 B, vocabulary]`: B rows with memory, then the same rows without.
        """
        with_memory, without = scores.float().log_softmax(-1).chunk(2)
        weights = self._weights.to(scores.device)[:, None]
        highest = torch.maximum(with_memory + weights.log(), without + (1 - weights).log())
        return highest.log_softmax(-1).repeat(2, 1)


_MAJORITY = 0.5


def abstention_beginning(prompts: PromptEncoder) -> list[int] | None:
    """The abstention's tokens up to the first that distinguishes it from answers; None without an abstention.

    Answers that begin with other letters may share its first token, for example a space. In a chat, where an answer may
    be any sentence and many begin with "I", only all its tokens distinguish it.
    """
    text = prompts.format.abstention
    if text is None:
        return None
    ids = prompts.answer(text)
    if prompts.format.chat:
        return ids
    others = [prompts.answer(letter) for letter in ascii_letters if letter.lower() != text.lstrip()[:1].lower()]
    count = 1
    while count < len(ids) and any(other[:count] == ids[:count] for other in others):
        count += 1
    return ids[:count]


class AbstainByMajority:
    """Lets an answer begin as the abstention only if that has at least half of the probability.

    All abstentions begin alike, but answers in many ways. So the abstention's token can be the most probable one even
    if the probability of answering is higher.

    Args:
        beginning: the tokens that the abstention begins with; the last one distinguishes it from answers.
    """

    def __init__(self, beginning: Sequence[int]) -> None:
        *self._common, self._token = beginning

    def __call__(self, said: Tensor, scores: Tensor) -> Tensor:
        """Logits `[B, vocabulary]` of the token after answers `[B, L]`, without their prompts."""
        if said.shape[1] != len(self._common):
            return scores
        elsewhere = (said != said.new_tensor(self._common)).any(1)
        stays = elsewhere | (scores.float().softmax(-1)[:, self._token] >= _MAJORITY)
        # Finite, so that the abstention remains possible if no other token is allowed.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.clone()
        scores[:, self._token] = torch.where(stays, scores[:, self._token], lowest)
        return scores


_NO_TOKEN = -1


# Marks of tokens that begin or continue a word, in the vocabularies of BPE, SentencePiece and WordPiece.
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
        """A text. Its spans consist of whole words: they begin and end where no run of letters or digits is split."""
        ids, covered = tokenizer.ids_and_spans(text)
        # Several tokens may share a character, each holding some of its bytes.
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
        """A fixed answer, which can be copied only as a whole."""
        places = range(len(ids))
        return cls(tuple(ids), tuple(i == 0 for i in places), tuple(i == len(ids) - 1 for i in places))


def _inside_word(text: str, place: int) -> bool:
    """True if there are letters or digits on both sides of an index in a text."""
    return 0 < place < len(text) and text[place - 1].isalnum() and text[place].isalnum()


class ExtractiveDecoding(LogitsProcessor):
    """Allows only tokens with which the answer remains a span of one of its sources.

    An answer may end where a span may stop. Rows without sources are decoded freely, except for what hardly any span
    contains: the same token twice in a row, or the same pair of tokens again. Numerals may repeat, as in 1,000,000.

    An LM with memory is not bound: memory tokens hold no text, and they cover more documents than those before the
    question. So in max-rule ensemble decoding only the LM without memory is bound to the sources. Once the LM with
    memory wins with a token that continues no source, both are free.

    Examples:
        >>> text = SpanSource((5, 6, 7), starts=(True, True, False), stops=(True, False, True))
        >>> spans = ExtractiveDecoding([[text]], prompt_length=1, end_tokens=[2], numerals=[])
        >>> def allowed(*ids: int) -> list[int]:
        ...     return spans(torch.tensor([ids]), torch.zeros(1, 9)).isfinite().nonzero()[:, 1].tolist()
        >>> allowed(1), allowed(1, 6), allowed(1, 5), allowed(1, 6, 7)
        ([5, 6], [7], [2, 6], [2])

    Args:
        sources: for each of B rows the sources that its answer may copy from; empty for a row that is free.
        prompt_length: number of tokens of `input_ids` before the answer.
        end_tokens: ids of the tokens that end an answer.
        numerals: ids of tokens of digits.
        halves: True if the same rows without memory follow the rows; then only these are bound.
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
        # One place without a token follows each source, so that no span continues into the next source.
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
        """The decoding of a subset of the B rows, by their indices."""
        part = object.__new__(ExtractiveDecoding)
        part.__dict__.update(self.__dict__)
        rows = rows.to(self._tokens.device)
        part._tokens, part._starts, part._stops = self._tokens[rows], self._starts[rows], self._stops[rows]
        return part

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[N, vocabulary]`, `-inf` for tokens that may not come next.

        Args:
            input_ids: `[N, L]`, prompts and answers so far. N is B, and twice that with `halves`.
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
        """Scores of the tokens that continue a span, and for each row True if the answer so far begins a span."""
        device = scores.device
        tokens, starts, stops = (part.to(device) for part in (self._tokens, self._starts, self._stops))
        length = generated.shape[1]
        # Places where a span that equals the answer so far may begin.
        begins = starts & (tokens == generated[:, :1]) if length else starts
        rows, places = begins.nonzero(as_tuple=True)
        for step in range(1, length):
            same = tokens[rows, places + step] == generated[rows, step]
            rows, places = rows[same], places[same]
        allowed = torch.zeros(scores.shape, dtype=torch.bool, device=device)
        following = tokens[rows, places + length]
        goes_on = following != _NO_TOKEN
        allowed[rows[goes_on], following[goes_on]] = True
        if length:
            stopping = rows[stops[rows, places + length - 1]]
            for token in self._end_tokens:
                allowed[stopping, token] = True
        matched = torch.zeros(len(scores), dtype=torch.bool, device=device)
        matched[rows] = True
        return scores.masked_fill(~allowed, -torch.inf), matched

    def _without_repetition(self, generated: Tensor, scores: Tensor) -> Tensor:
        """Scores that bar the last token, and any token that already followed it; numerals and end tokens stay."""
        length = generated.shape[1]
        if not length:
            return scores
        last = generated[:, -1:]
        # At each earlier occurrence of the last token, the token after it; elsewhere the last token itself.
        behind = torch.where(generated[:, :-1] == last, generated[:, 1:], last)
        repeated = torch.cat([last, behind], 1)
        barred = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(1, repeated, True)
        barred[:, self._unbarred] = False
        return scores.masked_fill(barred, -torch.inf)
