"""One face for everything that adapts to documents and then answers: MAC, and the baselines that it is held against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mac_rag.engine import MACEngine
from mac_rag.progress import progress_bar

if TYPE_CHECKING:
    from mac_rag.base_lm import BaseLM
    from mac_rag.data.types import Document
    from mac_rag.model import MACModel


class System(ABC):
    """What experiments loop over. A new one has seen no document.

    Attributes:
        name: what tables call it.
        settings: what it was made with, for the result: learning rate, kind of spans, k, ...
    """

    name: str
    settings: Mapping[str, str | int | float] = {}

    @abstractmethod
    def adapt(self, documents: Sequence[Document]) -> None:
        """Takes in further documents of the stream, in this order.

        Raises:
            DocumentError: for a document that it cannot take.
        """

    @abstractmethod
    def answer(self, questions: Sequence[str]) -> list[str]:
        """Answers questions about the documents so far; changes nothing.

        Raises:
            DocumentError: for a question that it cannot take.
        """


class MACSystem(System):
    """MAC: documents into the memory bank, answers from memory alone.

    Args:
        model: a trained model.
        batch_size: questions of one generation.
    """

    name = "MAC"

    def __init__(self, model: MACModel, *, batch_size: int = 32) -> None:
        self._engine = MACEngine(model)
        self._batch_size = batch_size

    def adapt(self, documents: Sequence[Document]) -> None:
        self._engine.adapt(documents)

    def answer(self, questions: Sequence[str]) -> list[str]:
        return [answer.text for answer in self._engine.answer(questions, batch_size=self._batch_size, progress=True)]


def generate(base_lm: BaseLM, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch_size: int) -> list[str]:
    """Greedy answers of an LM to any number of prompts, those of similar length together.

    Args:
        base_lm: the LM.
        prompts: token ids, as `base_lm.prompts` writes them.
        max_new_tokens: longest answer.
        batch_size: prompts of one generation.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers = [""] * len(prompts)
    with progress_bar("answer", len(prompts)) as bar:
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            texts = base_lm.generate([prompts[i] for i in chosen], None, max_new_tokens=max_new_tokens)
            for index, text in zip(chosen, texts, strict=True):
                answers[index] = text
            bar.advance(len(chosen))
    return answers
