"""Parts of the tests of dense retrieval: an encoder that needs no model and counts what it is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from mac_rag.data.types import Document
from mac_rag.retrieval.embeddings import Vectors


class WordEncoder:
    """Bags of hashed words: deterministic, and texts that share words are near each other."""

    width = 32

    def __init__(self, name: str = "words", fail_after: int | None = None) -> None:
        self.fingerprint = name
        self.encoded: list[str] = []
        self._left = fail_after

    def documents(self, texts: Sequence[str], advance: Callable[[int], None] | None = None) -> Vectors:
        if self._left is not None:
            if not self._left:
                raise KeyboardInterrupt
            self._left -= 1
        self.encoded += texts
        if advance is not None:
            advance(len(texts))
        return self.questions(texts)

    def questions(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row, hashlib.sha256(word.encode()).digest()[0] % self.width] += 1
        return vectors


def documents(*texts: str) -> list[Document]:
    return [Document(f"d{index}", text, {"place": index}) for index, text in enumerate(texts)]
