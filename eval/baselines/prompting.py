"""Baselines that leave the LM as it is: zero-shot, few-shot and retrieval-augmented prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from eval.harness.published import answers_to, in_batches, searched
from eval.harness.scales import Protocol
from eval.harness.systems import System
from mac_rag.data.types import Document, Question
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever


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
        self._protocol = protocol
        self._examples = [(example.question, example.answers[0]) for example in examples]

    def adapt(self, documents: Sequence[Document]) -> None:
        """Does nothing: the prompts do not depend on documents."""

    def answer(self, questions: Sequence[str]) -> list[str]:
        lm = self._model.base_lm
        prompts = [lm.prompts.after_examples(self._examples, question) for question in questions]
        limit = self._model.config.max_new_tokens
        return answers_to(lm, prompts, self._protocol, max_new_tokens=limit, batch_size=self._batch_size)


class RetrieverOnly(System):
    """The LM after the k documents that BM25 retrieves, without memory."""

    def __init__(self, model: MACModel, k: int, *, batch_size: int = 32, protocol: Protocol = "strict") -> None:
        self.name = f"bm25 top-{k}"
        self.settings = {"retriever": "bm25", "k": k}
        self._retriever = BM25Retriever()
        self._k = k
        self._engine = MACEngine(model)
        self._batch_size = batch_size
        self._protocol = protocol

    def adapt(self, documents: Sequence[Document]) -> None:
        self._retriever.add(documents)

    def answer(self, questions: Sequence[str]) -> list[str]:
        contexts = [[hit.text for hit in hits] for hits in self._retriever.retrieve(questions, self._k)]
        prompts = [
            self._engine.model.fit_to_window(question, texts, overflow="truncate")
            for question, texts in zip(questions, contexts, strict=True)
        ]
        if self._protocol == "published":
            lm = self._engine.model.base_lm
            return in_batches(lambda batch: searched(lm, [prompt.ids for prompt in batch]), prompts, self._batch_size)
        answers = self._engine.answer(prompts, use_memory=False, batch_size=self._batch_size, progress=True)
        return [answer.text for answer in answers]


def drawn_examples(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """Draws `count` examples for `FewShot` from training questions."""
    if count > len(questions):
        raise ConfigError(f"{count} examples are wanted, but the training set has {len(questions)} questions")
    return random.Random(seed).sample(list(questions), count)
