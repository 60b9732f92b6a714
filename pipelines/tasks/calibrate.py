"""Fits the calibration of a model: questions of which half have their answers taken out of memory.

Confidence must be low if memory does not hold the answer. So half of the questions are asked of a bank without the
document of the question and without every other that holds one of its answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mac_rag.data.metrics import best_over, f1, normalize
from mac_rag.data.types import QADataset, Question
from mac_rag.engine import MACEngine
from mac_rag.model.calibration import Calibration, Logistic, Mode
from mac_rag.progress import progress_bar

RIGHT = 0.5  # least F1 of a right answer


@dataclass(frozen=True)
class Guess:
    """An answer whose confidence is examined.

    It is not `answerable` if the documents with its answer were taken out of the bank, and right if its F1 with an
    accepted answer is at least 0.5: an answer with a word too many is no guess.
    """

    question: Question
    answerable: bool
    text: str
    right: bool


def guesses(
    engine: MACEngine, dataset: QADataset, count: int, *, seed: int, batch_size: int
) -> tuple[list[Guess], Tensor, Mode]:
    """Adapts an engine to a stream, asks it questions, and takes the answers to every second one away.

    Args:
        engine: the engine; with a retriever, its documents stand before the questions.
        dataset: the stream; questions without an answer or a document are left out.
        count: number of questions, drawn by the seed.
        batch_size: questions that are answered at a time; those without their answers are asked one by one.

    Returns:
        The answers, their evidence `[N, len(EVIDENCE)]`, and the way of answering.
    """
    engine.adapt(dataset.documents, progress=True)
    asked = [question for question in dataset.questions if question.answers and question.document_id is not None]
    random.Random(seed).shuffle(asked)
    asked = asked[:count]
    texts = {document.id: f" {normalize(document.text)} " for document in dataset.documents}
    calls: list[tuple[list[Question], frozenset[str] | None]] = []
    kept, taken = asked[::2], asked[1::2]
    calls += [(kept[first : first + batch_size], None) for first in range(0, len(kept), batch_size)]
    calls += [([question], without_answers(question, texts)) for question in taken]
    found: list[Guess] = []
    evidence = []
    model = engine.model
    mode: Mode = "memory" if engine.retriever is None else "documents"
    with progress_bar("answer", len(asked)) as bar:
        for questions, allowed in calls:
            prompts = []
            for question in questions:
                hits = (
                    []
                    if engine.retriever is None
                    else engine.retriever.retrieve([question.question], engine.k, allowed=allowed)[0]
                )
                write = partial(model.fit_to_window, question.question, overflow="truncate")
                prompts.append(engine.fit(hits, write, allowed=allowed))
            answers = [answer.text for answer in engine.answer(prompts, allowed=allowed, batch_size=batch_size)]
            evidence.append(engine.evidence(prompts, answers, allowed=allowed))
            found += [
                Guess(question, allowed is None, text, best_over(f1, text, question.answers) >= RIGHT)
                for question, text in zip(questions, answers, strict=True)
            ]
            bar.advance(len(questions))
    return found, torch.cat(evidence), mode


def without_answers(question: Question, texts: dict[str, str]) -> frozenset[str]:
    """Ids of the documents that hold none of a question's answers, and are not its own.

    `texts` has the normalized text of each document between two spaces, by id.
    """
    answers = [f" {normalized} " for answer in question.answers if (normalized := normalize(answer))]
    return frozenset(
        name
        for name, text in texts.items()
        if name != question.document_id and not any(answer in text for answer in answers)
    )


def fit(engine: MACEngine, found: Sequence[Guess], evidence: Tensor, mode: Mode, data: str) -> Calibration:
    """The model's calibration with a new fit for one way of answering; fits of other weights are left out.

    Raises:
        ConfigError: if all answers are right, or none is.
    """
    model, old = engine.model, engine.model.calibration
    modes = {} if old is None or old.fingerprint != model.fingerprint else dict(old.modes)
    modes[mode] = Logistic.fit(evidence, [guess.right for guess in found], data)
    return Calibration(fingerprint=model.fingerprint, modes=modes)
