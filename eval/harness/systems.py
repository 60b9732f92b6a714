"""The interface of all systems that adapt to documents and then answer: MAC and the baselines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from eval.harness.protocol import judge, summarize
from eval.harness.published import cut, decoding
from eval.harness.results import Row, Verdict
from eval.harness.scales import Protocol
from mac_rag.data.types import Document, Question
from mac_rag.engine import Answer, MACEngine
from mac_rag.model import AmortizedModel
from mac_rag.progress import progress_bar


class System(ABC):
    """A system that adapts to a stream and answers questions about it. A new system has seen no document.

    Attributes:
        name: name of its row in tables.
        settings: its settings in the result: learning rate, kind of spans, k, ...
        networks: networks that adaptation holds in memory.
    """

    name: str
    settings: Mapping[str, str | int | float] = {}
    networks: Sequence[nn.Module] = ()

    @abstractmethod
    def adapt(self, documents: Sequence[Document]) -> None:
        """Adapts to further documents of the stream, in this order.

        Raises:
            DocumentError: for a document that the system cannot take.
        """

    @abstractmethod
    def answer(self, questions: Sequence[str]) -> list[str]:
        """Answers questions about the documents so far, and leaves the system as it is.

        Raises:
            DocumentError: for a question that the system cannot take.
        """


class MACSystem(System):
    """MAC: documents into the memory bank, answers from memory alone."""

    name = "MAC"

    def __init__(self, model: AmortizedModel, *, batch_size: int = 32, protocol: Protocol = "strict") -> None:
        self.networks = [model.amortization]
        self._model = model
        self.engine = MACEngine(model)
        self._batch_size = batch_size
        self._protocol = protocol

    def adapt(self, documents: Sequence[Document]) -> None:
        self.engine.adapt(documents if self._protocol == "strict" else cut(self._model, documents))

    def answer(self, questions: Sequence[str]) -> list[str]:
        searching = decoding(self._protocol)

        def answered(batch: Sequence[str]) -> list[str]:
            return self._model.generate(batch, modulation=self.engine.aggregate(batch), **searching)

        if searching:
            return in_batches(answered, questions, self._batch_size)
        return [answer.text for answer in self.engine.answer(questions, batch_size=self._batch_size, progress=True)]


def in_batches(answer: Callable[[Sequence[Any]], list[str]], asked: Sequence[Any], size: int) -> list[str]:
    """The answers to questions or prompts, of which `answer` takes so many at once."""
    texts: list[str] = []
    with progress_bar("answer", len(asked)) as bar:
        for first in range(0, len(asked), size):
            texts += answer(asked[first : first + size])
            bar.advance(min(size, len(asked) - first))
    return texts


def ask(
    name: str, system: System, questions: Sequence[Question], documents: int, protocol: Protocol = "strict"
) -> tuple[Row, list[Verdict]]:
    """Asks a system questions after its adaptation; returns the row, and the verdict on each answer."""
    began = time.perf_counter()
    texts = system.answer([question.question for question in questions])
    seconds = time.perf_counter() - began
    verdicts = judge(questions, [Answer(text, (), (), False) for text in texts], protocol)
    row = summarize(name, questions, verdicts, documents, None, seconds)
    return row.model_copy(update={"settings": {"method": system.name, **system.settings}}), verdicts
