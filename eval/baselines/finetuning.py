"""Online fine-tuning: the LM is updated on the stream, document by document, and then answers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING

import torch

from eval.baselines.weighting import TokenWeighting, passages, weighted_loss
from eval.harness.systems import System, generate
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.progress import progress_bar

if TYPE_CHECKING:
    from mac_rag.data.types import Document, Question


# Tuning on questions and answers of the training split. The rate is one that fine-tuning searches among at both scales.
_TUNING_BATCH = 16  # questions of one step
_TUNING_RATE = 2.5e-5


class FineTuning(System):
    """A copy of the LM that takes one step of Adam on each document, in the order of the stream.

    There is no dropout, so equal streams give equal LMs.

    Args:
        base_lm: an LM tuned on questions and answers; it is copied and stays as it is.
        weighting: weights of the tokens in the loss.
        learning_rate: learning rate of Adam, constant.
        max_new_tokens: limit of an answer's tokens.
        batch_size: questions of one generation.
        tuning_steps: steps of tuning on questions and answers, of a copy, before the first answer after an adaptation.
        training_questions: questions of the tuning.
        seed: random seed of their order.

    Raises:
        ConfigError: for a quantised LM, whose weights cannot be updated.
    """

    def __init__(
        self,
        base_lm: BaseLM,
        weighting: TokenWeighting,
        learning_rate: float,
        *,
        max_new_tokens: int = 16,
        batch_size: int = 32,
        tuning_steps: int = 0,
        training_questions: Sequence[Question] = (),
        seed: int = 0,
    ) -> None:
        self.name = weighting.name
        self.settings = {"learning_rate": learning_rate, **weighting.settings}
        if tuning_steps:
            self.settings["answer_tuning_steps"] = tuning_steps
        self.lm = trainable_copy(base_lm)
        self.networks = [self.lm, *weighting.networks]
        self._weighting = weighting
        self._optimizer = torch.optim.Adam(self.lm.parameters(), lr=learning_rate)
        self._max_new_tokens = max_new_tokens
        self._batch_size = batch_size
        self._tuning_steps = tuning_steps
        self._training_questions = training_questions
        self._seed = seed
        self._answering: BaseLM | None = None

    def adapt(self, documents: Sequence[Document]) -> None:
        self._answering = None
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
        if self._answering is None:
            self._answering = self.lm
            if self._tuning_steps:
                self._answering = trainable_copy(self.lm)
                tune_answers(self._answering, self._training_questions, self._tuning_steps, seed=self._seed)
        prompts = [self._answering.prompts.prompt(question) for question in questions]
        self.tokens_fed += sum(map(len, prompts))
        return generate(self._answering, prompts, max_new_tokens=self._max_new_tokens, batch_size=self._batch_size)


def trainable_copy(base_lm: BaseLM) -> BaseLM:
    """A copy of an LM with all weights trainable.

    Raises:
        ConfigError: for a quantised LM.
    """
    lm = copy.deepcopy(base_lm.model)
    make_trainable(lm, None)
    return BaseLM(lm.eval(), base_lm.tokenizer, base_lm.prompts.format)


def tune_answers(base_lm: BaseLM, questions: Sequence[Question], steps: int, *, seed: int = 0) -> None:
    """Trains an LM in place on answers to questions without documents.

    Args:
        base_lm: a trainable LM.
        questions: at least one; repeated in one order, which the seed draws.
        steps: steps of Adam.
        seed: random seed of the order.
    """
    order = cycle(random.Random(seed).sample(range(len(questions)), len(questions)))
    optimizer = torch.optim.Adam(base_lm.parameters(), lr=_TUNING_RATE)
    with progress_bar("tune answers", steps) as bar:
        for _ in range(steps):
            batch = [questions[index] for index in islice(order, _TUNING_BATCH)]
            prompts = [base_lm.prompts.prompt(question.question) for question in batch]
            answers = [base_lm.prompts.answer(question.answers[0]) for question in batch]
            optimizer.zero_grad()
            (base_lm.answer_loss(prompts, answers, None).sum() / sum(map(len, answers))).backward()
            optimizer.step()
            bar.advance()


def search_learning_rate(
    make: Callable[[float], System],
    rates: Sequence[float],
    documents: Sequence[Document],
    questions: Sequence[Question],
) -> tuple[float, dict[float, float]]:
    """Searches the learning rate on a validation stream: adapt, then ask (appendix A).

    Args:
        make: makes a new system with a learning rate.
        rates: learning rates to try.
        documents, questions: the validation stream.

    Returns:
        The rate with the highest mean F1, the smallest of equals, and the F1 of each rate.
    """
    from mac_rag.data.metrics import best_over, f1

    f1_by_rate = {}
    for rate in sorted(rates):
        system = make(rate)
        system.adapt(documents)
        answers = system.answer([question.question for question in questions])
        scores = [best_over(f1, text, question.answers) for text, question in zip(answers, questions, strict=True)]
        f1_by_rate[rate] = sum(scores) / len(scores)
    return max(f1_by_rate, key=lambda rate: f1_by_rate[rate]), f1_by_rate
