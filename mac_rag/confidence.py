"""How sure an answer is: evidence from memory and LM, and the probability that the model's calibration gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mac_rag.data.metrics import normalize
from mac_rag.data.types import Answer
from mac_rag.errors import ConfigError
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel
from mac_rag.model.calibration import Logistic, Mode
from mac_rag.sources import support_of

# Whatever is not learned by the model's prompt format.
I_DO_NOT_KNOW = "I don't know"


def calibration_of(model: MACModel, mode: Mode) -> Logistic:
    """The logistic model for one way of answering.

    Raises:
        ConfigError: when none was fitted for the model as it is, or none for this way of answering.
    """
    calibration = model.calibration
    remedy = (
        "fit one with: python -m pipelines.calibrate --model FOLDER --data NAME:PATH"
        f"{' --retriever NAME' if mode == 'documents' else ''}"
    )
    if calibration is None:
        raise ConfigError(f"the model has no calibration, which min_confidence needs; {remedy}")
    if calibration.fingerprint != model.fingerprint:
        raise ConfigError(f"the model's calibration was fitted for other weights; {remedy}")
    if mode not in calibration.modes:
        behind = "behind documents" if mode == "documents" else "from memory alone"
        raise ConfigError(f"the model's calibration was not fitted for answers {behind}; {remedy}")
    return calibration.modes[mode]


def mode_of(prompt: FittedPrompt) -> Mode:
    """How a prompt is answered."""
    return "documents" if prompt.contexts else "memory"


def check_threshold(min_confidence: float | None) -> None:
    """Checks a `min_confidence`.

    Raises:
        ConfigError: for one that is not from 0 to 1.
    """
    if min_confidence is not None and not 0 <= min_confidence <= 1:
        raise ConfigError(f"min_confidence is {min_confidence}; give a probability from 0 to 1")


def confidences(model: MACModel, prompts: Sequence[FittedPrompt], evidence: Tensor) -> list[float]:
    """The probability that each answer is right, from its evidence `[B, len(EVIDENCE)]`.

    Raises:
        ConfigError: as `calibration_of`.
    """
    fits = {mode: calibration_of(model, mode) for mode in {mode_of(prompt) for prompt in prompts}}
    return [
        float(fits[mode_of(prompt)].probability(row[None])[0]) for prompt, row in zip(prompts, evidence, strict=True)
    ]


def doubted(
    model: MACModel,
    prompts: Sequence[FittedPrompt],
    answers: Sequence[Answer],
    evidence: Tensor,
    min_confidence: float,
) -> list[Answer]:
    """The answers with their confidence; "I don't know" in place of those below `min_confidence`.

    Raises:
        ConfigError: as `calibration_of`.
    """
    refusal = model.config.prompt.abstention or I_DO_NOT_KNOW
    told = [
        replace(answer, confidence=sure)
        for answer, sure in zip(answers, confidences(model, prompts, evidence), strict=True)
    ]
    return [
        replace(answer, text=refusal, guess=answer.text) if (answer.confidence or 0.0) < min_confidence else answer
        for answer in told
    ]


@torch.no_grad()
def evidence_of(
    model: MACModel,
    prompts: Sequence[FittedPrompt],
    answers: Sequence[str],
    phi: Tensor | None,
    prior: Tensor | None,
) -> Tensor:
    """What is known of B answers, `[B, len(EVIDENCE)]` in float32 on the CPU.

    - `prior`: the document prior of the best row before the softmax and its scale: a cosine, plus the product of the
      lexical vectors. Unlike attention, it is low where no document is about the question.
    - `prior_odds`: the log-odds of that row's share of the prior: how far it is ahead of all others together.
    - `first_log_probability`: the log-probability of the answer's first token under the LM with memory.
    - `log_probability`: the mean over all of its tokens, the end included.
    - `log_probability_without_memory`: that of the LM without memory, behind documents: what memory and documents both
      say is right more often.
    - `repetition`: the share of the answer's words that stand in the question, 1 for an answer without words. An LM
      that does not know often says back what was asked.
    - `support`: behind documents, the share of the question's words in the sentence that says the answer; 0 where no
      sentence does.
    - `abstention`: 1 for an answer that is the abstention which the LM has learned. The LM may be sure of it, but it is
      never right.
    - `answering_odds`: of an LM that has learned to abstain, the log-odds that it answers. Where memory or documents do
      not hold what is asked, the LM doubts, though it holds an abstention less probable than all answers together.

    Attention is no evidence: its shares sum to 1 whatever is asked.

    What there is not, such as the prior of an answer without memory, is 0.

    Args:
        model: the model.
        prompts: B prompts.
        answers: B answers.
        phi: `[B, T, D]`; None for answers without memory.
        prior: `[B, 2]`, see `mac_rag.memory.views.base_reader.Reader.prior_evidence`; None without memory or prior.
    """
    first, mean = model.score_answers(prompts, answers, modulation=phi)
    alone = torch.zeros(len(prompts))
    behind = [row for row, prompt in enumerate(prompts) if prompt.contexts and phi is not None]
    if behind:
        _, alone[behind] = model.score_answers([prompts[row] for row in behind], [answers[row] for row in behind])
    repeated = [repetition(prompt.question, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    supported = [supported_by(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    abstained = [float(is_abstention(model, answer)) for answer in answers]
    best = torch.zeros(len(prompts), 2) if prior is None else prior.float().cpu()
    told = torch.tensor([repeated, supported, abstained]).T
    odds = model.answering_odds(prompts, modulation=phi)
    odds = torch.zeros(len(prompts)) if odds is None else odds
    return torch.cat([best, torch.stack([first, mean, alone], 1), told, odds[:, None]], 1)


def is_abstention(model: MACModel, answer: str) -> bool:
    """True if an answer is the one by which the model says that it knows none."""
    abstention = model.config.prompt.abstention
    return abstention is not None and normalize(answer) == normalize(abstention)


def supported_by(prompt: FittedPrompt, answer: str) -> float:
    """The share of the question's words in the sentence in front of it that says an answer; 0 where none does."""
    found = [support_of(text, answer, prompt.question) for text in prompt.contexts]
    return max((support.overlap for support in found if support is not None), default=0.0)


def repetition(question: str, answer: str) -> float:
    """The share of an answer's words that stand in the question; 1 for an answer without words.

    Examples:
        >>> repetition("Who opened the bridge in May?", "the bridge of Anna Berg")
        0.25
    """
    asked, said = set(normalize(question).split()), normalize(answer).split()
    return sum(word in asked for word in said) / len(said) if said else 1.0
