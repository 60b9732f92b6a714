"""The interface of all systems that adapt to documents and then answer: MAC and the baselines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from eval.harness.protocol import judge, summarize
from eval.harness.published import cut, in_batches, with_memory
from eval.harness.results import Row, Verdict
from eval.harness.scales import Protocol
from mac_rag.data.types import Document, Question
from mac_rag.engine import Answer, MACEngine
from mac_rag.model import AmortizedModel


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
        if self._protocol == "published":
            return in_batches(self._searched, questions, self._batch_size)
        return [answer.text for answer in self.engine.answer(questions, batch_size=self._batch_size, progress=True)]

    def _searched(self, questions: Sequence[str]) -> list[str]:
        return with_memory(self._model, questions, cast(Tensor, self.engine.aggregate(questions)))


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
