"""The answering half of a MAC model: fitting prompts to the LM's window, generation and streaming."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal, overload

import torch
from torch import Tensor

from mac_rag.config import MACConfig
from mac_rag.data.characters import fault_of, shown
from mac_rag.errors import ConfigError, DocumentError, PromptError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.batching import length_buckets
from mac_rag.lm.chat import ChatPromptEncoder, Message
from mac_rag.lm.decoding import GREEDY, Sampling, SpanSource
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.memory_slots import Look, heard_slots
from mac_rag.nn.modulation import Modulation, ModulationNetwork

_LEAST_PROBABILITY = 1e-6  # of an abstention, and of an answer


class GenerationMixin:
    """The part of `mac_rag.model.MACModel` that answers. `MACModel` sets the attributes.

    Attributes:
        config: all sizes.
        base_lm: the frozen LM.
        input_encoder: g_input.
        modulation: maps phi* to a modulation of the LM.
        cpu_batch_tokens: prompt tokens per batch on a CPU; larger batches exceed its caches and are slower.
    """

    config: MACConfig
    base_lm: BaseLM
    input_encoder: TextEncoder
    modulation: ModulationNetwork
    cpu_batch_tokens: float = 1024

    @property
    def context_window(self) -> int:
        """Largest number of tokens of documents, question and answer together."""
        return self.config.context_window or self._positions

    @property
    def _positions(self) -> int:
        """Positions of the LM that the prefix of memory tokens does not take."""
        return self.base_lm.context_window - self.modulation.prefix_length

    def fit_to_window(
        self,
        question: str | FittedPrompt,
        contexts: Sequence[str] = (),
        *,
        overflow: Literal["error", "truncate"] = "error",
        max_new_tokens: int | None = None,
    ) -> FittedPrompt:
        """A question and its documents as token ids that fit the LM's window.

        Args:
            question: x; a `FittedPrompt` is returned as it is.
            contexts: documents in front of it, the best first.
            overflow: if they do not fit: raise an error, or cut the documents from the last one on. The question is
                never cut.
            max_new_tokens: longest answer, which must fit too; None for the configured length.

        Raises:
            DocumentError: for an empty question, a text with half of a surrogate pair or NUL, or a prompt beyond the
                window.
        """
        if isinstance(question, FittedPrompt):
            return question
        room = self.context_window - (max_new_tokens or self.config.max_new_tokens)
        question_ids = self.input_encoder.ids(question)  # checks the question, even if no memory is used
        _check_each(contexts, "document")
        fitted = self.base_lm.prompts.fit_to_window(question, contexts, room)
        taken = self.base_lm.prompts.positions
        if taken(fitted.ids) > room or (fitted.truncated and overflow == "error"):
            used = taken(self.base_lm.prompts.prompt(question, contexts))
            raise DocumentError(
                f"{len(contexts)} documents and the question take {used} tokens, but the LM's window leaves room for "
                f"{room}; give fewer or shorter documents (a smaller k or chunk size)"
            )
        return replace(fitted, question_ids=tuple(question_ids))

    def fit_conversation(
        self,
        messages: Sequence[Message],
        *,
        question: str | None = None,
        contexts: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> FittedPrompt:
        """A conversation as token ids that fit the LM's window; only for models whose prompt format is `chat`.

        Args:
            messages: the conversation; see `ChatPromptEncoder.fit_conversation`.
            question: what the memory is asked; None for the last message. Of a question beyond the input encoder's
                limit, the memory is asked the end.
            contexts: texts in the messages that may be cut, the best first.
            max_new_tokens: longest answer, which must fit too; None for the configured length.

        Raises:
            ConfigError: for another prompt format.
            DocumentError: for a message with half of a surrogate pair or NUL.
            PromptError: for a conversation that the chat template refuses, or that is beyond the window.
        """
        prompts = self.base_lm.prompts
        if not isinstance(prompts, ChatPromptEncoder):
            raise ConfigError("prompt.chat is false, but only a chat reads conversations; set it and train the model")
        room = self.context_window - (max_new_tokens or self.config.max_new_tokens)
        _check_each([message.text for message in messages], "message")
        asked = messages[-1].text if question is None and messages else question or ""
        fitted = prompts.fit_conversation(messages, asked, contexts, room)
        if len(fitted.ids) > room:
            raise PromptError(
                f"the conversation takes {len(fitted.ids)} tokens, but the LM's window leaves room for {room}; "
                "shorten its history or its prompts"
            )
        return replace(fitted, question_ids=tuple(self.input_encoder.plan(asked)[-1]))

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str | FittedPrompt],
        contexts: Sequence[Sequence[str]] | None = None,
        *,
        modulation: Tensor | None = None,
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        memory_weight: float | None = None,
        sampling: Sampling = GREEDY,
    ) -> list[str]:
        """Answers questions: `LM(d + x; phi*)`.

        Args:
            prompts: B questions, as texts or as results of `fit_to_window`.
            contexts: documents in front of each question; only for questions that are texts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.
            max_new_tokens: None for the configured length.
            num_beams: beams of beam search; 1 for none.
            memory_weight: lambda behind documents (see `mac_rag.lm.decoding`); None for the configured weight.
            sampling: how tokens are chosen, and what ends an answer early.

        Raises:
            ConfigError: for a memory_weight that is not above 0 and at most 1, and for beams and sampling together.
        """
        fitted = self._as_fitted(prompts, contexts)
        weights = self._weights(fitted, memory_weight)
        answers = [""] * len(fitted)
        for rows in self._batches(fitted, modulation):
            texts = self.base_lm.generate(
                [fitted[i].ids for i in rows],
                self._modulation(None if modulation is None else modulation[rows]),
                max_new_tokens=max_new_tokens or self.config.max_new_tokens,
                num_beams=num_beams,
                weights=None if weights is None else [weights[i] for i in rows],
                sampling=sampling,
                sources=self.span_sources([fitted[i] for i in rows]),
            )
            for i, text in zip(rows, texts, strict=True):
                answers[i] = text
        return answers

    @torch.no_grad()
    def generate_each(
        self, prompts: Sequence[FittedPrompt], modulation: Tensor, weights: Sequence[float]
    ) -> list[list[str]]:
        """Greedy answers behind documents at each of several memory weights; all weights share the prompts' cache.

        Args:
            prompts: B questions behind at least one document each.
            modulation: phi* `[B, T, D]`.
            weights: values of lambda (see `mac_rag.lm.decoding`), from 0 (the frozen LM alone) to 1.

        Returns:
            B answers for each weight.
        """
        answers = [[""] * len(prompts) for _ in weights]
        for rows in self._batches(prompts, modulation):
            each = self.base_lm.generate_each(
                [prompts[i].ids for i in rows],
                self._modulation(modulation[rows]),
                max_new_tokens=self.config.max_new_tokens,
                weights=weights,
                sources=self.span_sources([prompts[i] for i in rows]),
            )
            for at_weight, texts in zip(answers, each, strict=True):
                for i, text in zip(rows, texts, strict=True):
                    at_weight[i] = text
        return answers

    @torch.no_grad()
    def score_answers(
        self, prompts: Sequence[FittedPrompt], answers: Sequence[str], *, modulation: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of the first token of answers under the LM, and the mean over their tokens, the end included.

        An answer beyond the LM's positions counts as far as it fits.

        Args:
            prompts: B prompts.
            answers: B texts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.

        Returns:
            `[B]` each, in float32 on the CPU.
        """
        ids = [self.base_lm.prompts.answer(text) for text in answers]
        first, mean = torch.zeros(len(prompts)), torch.zeros(len(prompts))
        for i, loss in enumerate(self._losses(prompts, ids, modulation)):
            first[i], mean[i] = -loss[0], -loss.mean()
        return first, mean

    @torch.no_grad()
    def answering_odds(self, prompts: Sequence[FittedPrompt], *, modulation: Tensor | None = None) -> Tensor | None:
        """The log-odds that the LM answers, and does not abstain; None for an LM that has not learned to abstain.

        Args:
            prompts: B prompts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.

        Returns:
            `[B]`, in float32 on the CPU.
        """
        if (beginning := self.base_lm.abstention) is None:
            return None
        return _answering_odds(self._losses(prompts, [beginning] * len(prompts), modulation)).float().cpu()

    def _losses(
        self, prompts: Sequence[FittedPrompt], answers: Sequence[Sequence[int]], phi: Tensor | None
    ) -> list[Tensor]:
        """The loss of each token of B answers, as far as they fit the LM's positions; see `score_answers`."""
        taken = self.base_lm.prompts.positions
        found = [torch.empty(0)] * len(prompts)
        for rows in self._batches(prompts, phi):
            losses = self.base_lm.token_losses(
                [prompts[i].ids for i in rows],
                [answers[i][: self._positions - taken(prompts[i].ids)] for i in rows],
                self._modulation(None if phi is None else phi[rows]),
            )
            for i, loss in zip(rows, losses, strict=True):
                found[i] = loss
        return found

    def look(self, questions: Sequence[str]) -> Look | None:
        """How the LM looks at single slots of phi* for some questions; None for a model whose LM does not.

        What it sees there are the log-odds that it answers, and does not abstain.
        """
        if self.config.aggregation.reading_cutoff is None or (beginning := self.base_lm.abstention) is None:
            return None
        prompts = [self.base_lm.prompts.prompt(question) for question in questions]

        @torch.no_grad()
        def odds(slots: Tensor, wanted: Tensor) -> Tensor:
            found = torch.zeros(wanted.shape, device=slots.device)
            places = wanted.nonzero().tolist()
            lengths = [slots.shape[2] + len(prompts[question]) for question, _ in places]
            at_once = self.cpu_batch_tokens if self.base_lm.device.type == "cpu" else math.inf
            for bucket in length_buckets(lengths, at_once):
                rows, columns = map(list, zip(*(places[number] for number in bucket), strict=True))
                losses = self.base_lm.token_losses(
                    [prompts[row] for row in rows],
                    [beginning] * len(rows),
                    self.modulation(slots[rows, columns]),
                )
                found[rows, columns] = _answering_odds(losses).to(found)
            return found

        return odds

    def _as_fitted(
        self, prompts: Sequence[str | FittedPrompt], contexts: Sequence[Sequence[str]] | None
    ) -> list[FittedPrompt]:
        """All prompts as token ids; documents of questions that are texts are not cut."""
        encoder = self.base_lm.prompts
        return [
            prompt if isinstance(prompt, FittedPrompt) else encoder.fit_to_window(prompt, texts)
            for prompt, texts in zip(prompts, contexts or [()] * len(prompts), strict=True)
        ]

    def _batches(self, prompts: Sequence[FittedPrompt], phi: Tensor | None) -> list[list[int]]:
        """Batches of prompts, as lists of indices: a single one on a GPU, several of similar lengths on a CPU.

        Those of one batch read equally many tokens of phi*.
        """
        memory = [0] * len(prompts) if phi is None else self.memory_in_prompt(phi)
        batches = []
        for tokens in sorted(set(memory)):
            rows = [row for row, own in enumerate(memory) if own == tokens]
            if self.base_lm.device.type == "cpu":
                buckets = length_buckets([tokens + len(prompts[row].ids) for row in rows], self.cpu_batch_tokens)
                batches += [[rows[place] for place in bucket] for bucket in buckets]
            else:
                batches.append(rows)
        return batches

    def memory_in_prompt(self, phi: Tensor) -> list[int]:
        """Tokens of phi* that the LM runs over with the prompt of each question; 0 for all modulations but a prompt.

        Args:
            phi: `[B, S T, D]`.
        """
        if not self.config.tokens_in_prompt:
            return [0] * len(phi)
        if not self.config.aggregation.cutoffs:
            return [phi.shape[1]] * len(phi)
        return [count * self.config.tokens for count in heard_slots(phi, self.config.tokens).tolist()]

    def stream(
        self,
        prompt: str | FittedPrompt,
        contexts: Sequence[str] = (),
        *,
        modulation: Tensor | None = None,
        max_new_tokens: int | None = None,
        memory_weight: float | None = None,
        sampling: Sampling = GREEDY,
    ) -> Iterator[str]:
        """Yields the answer to one question piece by piece; arguments as `generate`'s, phi* `[1, T, D]`."""
        [fitted] = self._as_fitted([prompt], [contexts])
        yield from self.base_lm.stream(
            fitted.ids,
            self._modulation(modulation),
            max_new_tokens=max_new_tokens or self.config.max_new_tokens,
            weights=self._weights([fitted], memory_weight),
            sampling=sampling,
            sources=self.span_sources([fitted]),
        )

    def _weights(self, prompts: Sequence[FittedPrompt], memory_weight: float | None) -> list[float] | None:
        """Memory weight per question: 1 without documents; None if all are 1."""
        weight = self.config.memory_weight if memory_weight is None else memory_weight
        if not 0 < weight <= 1:
            raise ConfigError(f"memory_weight is {weight}; give a number above 0 and at most 1")
        if weight == 1 or not any(prompt.contexts for prompt in prompts):
            return None
        return [weight if prompt.contexts else 1.0 for prompt in prompts]

    def span_sources(self, prompts: Sequence[FittedPrompt]) -> list[list[SpanSource]] | None:
        """What each answer may copy: its documents, and the fixed answers behind them; None for free answers."""
        if self.config.extractive is None:
            return None
        tokenizer = self.base_lm.prompts.texts
        return [
            [*(SpanSource.of_text(text, tokenizer) for text in prompt.contexts), *self._fixed_answers]
            if prompt.contexts
            else []
            for prompt in prompts
        ]

    @property
    def _fixed_answers(self) -> list[SpanSource]:
        """The answers that are possible behind any document."""
        prompts, extractive = self.base_lm.prompts, self.config.extractive
        texts = () if extractive is None else extractive.fixed_answers
        if prompts.format.abstention is not None:
            texts = (*texts, prompts.format.abstention)
        ids = [list(takewhile(lambda token: token not in prompts.end_tokens, prompts.answer(text))) for text in texts]
        return [SpanSource.whole(answer) for answer in ids]

    @overload
    def _modulation(self, phi: Tensor) -> Modulation: ...

    @overload
    def _modulation(self, phi: None) -> None: ...

    @torch.no_grad()
    def _modulation(self, phi: Tensor | None) -> Modulation | None:
        """The modulation of questions that read equally many tokens of phi*."""
        if phi is None:
            return None
        read = max(self.memory_in_prompt(phi), default=0)
        modulation: Modulation = self.modulation(phi[:, :read] if read else phi)
        return modulation


def _answering_odds(losses: Sequence[Tensor]) -> Tensor:
    """The log-odds that an answer begins otherwise than an abstention, `[B]`, from the losses of that one's tokens."""
    abstains = (-torch.stack([loss.sum() for loss in losses])).exp()
    odds: Tensor = -torch.special.logit(abstains, eps=_LEAST_PROBABILITY)
    return odds


def _check_each(texts: Sequence[str], kind: str) -> None:
    """Checks the characters of documents or messages before a template surrounds them, so that errors can place them.

    Raises:
        DocumentError: names the text by its kind and number, and the place in it.
    """
    for number, text in enumerate(texts, 1):
        fault = fault_of(text)
        if fault is not None:
            raise DocumentError(f"{kind} {number} of {len(texts)} in the prompt: {fault} (it begins {shown(text)})")
