"""Baselines that leave the LM as it is: zero-shot, few-shot and retrieval-augmented prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from eval.harness.published import decoding
from eval.harness.scales import Protocol
from eval.harness.systems import System, in_batches
from mac_rag.data.types import Document, Question
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever
from pipelines.tasks.open_book import generate


class FewShot(System):
    """Few-shot prompting: the same training questions with answers before every question; none for zero-shot."""

    def __init__(
        self,
        model: MACModel,
        examples: Sequence[Question] = (),
        *,
        batch_size: int = 32,
        protocol: Protocol = "strict",
    ) -> None:
        self.name = f"{len(examples)}-shot" if examples else "Zero-shot"
        self.settings = {"examples": len(examples)}
        self._model = model
        self._batch_size = batch_size
        self._decoding = {"max_new_tokens": model.config.max_new_tokens, **decoding(protocol)}
        self._examples = [(example.question, example.answers[0]) for example in examples]

    def adapt(self, documents: Sequence[Document]) -> None:
        """Does nothing: the prompts do not depend on documents."""

    def answer(self, questions: Sequence[str]) -> list[str]:
        lm = self._model.base_lm
        prompts = [lm.prompts.after_examples(self._examples, question) for question in questions]
        return generate(lm, prompts, batch_size=self._batch_size, **self._decoding)


class RetrieverOnly(System):
    """The LM after the k documents that BM25 retrieves, without memory."""

    def __init__(self, model: MACModel, k: int, *, batch_size: int = 32, protocol: Protocol = "strict") -> None:
        self.name = f"bm25 top-{k}"
        self.settings = {"retriever": "bm25", "k": k}
        self._retriever = BM25Retriever()
        self._k = k
        self._model = model
        self._batch_size = batch_size
        self._decoding = decoding(protocol)

    def adapt(self, documents: Sequence[Document]) -> None:
        self._retriever.add(documents)

    def answer(self, questions: Sequence[str]) -> list[str]:
        contexts = [[hit.text for hit in hits] for hits in self._retriever.retrieve(questions, self._k)]
        prompts = [
            self._model.fit_to_window(question, texts, overflow="truncate")
            for question, texts in zip(questions, contexts, strict=True)
        ]
        return in_batches(partial(self._model.generate, **self._decoding), prompts, self._batch_size)


def drawn_examples(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """Draws `count` examples for `FewShot` from training questions."""
    if count > len(questions):
        raise ConfigError(f"{count} examples are wanted, but the training set has {len(questions)} questions")
    return random.Random(seed).sample(list(questions), count)
