"""SQuAD's answer metrics: exact match and F1 after normalisation, and the prefix match of the published code."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(answer: str) -> str:
    """Lower-cases, drops punctuation and articles, and joins words by single spaces (SQuAD v1.1)."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if the two are equal after normalisation, else 0."""
    return float(normalize(prediction) == normalize(answer))


def prefix_match(prediction: str, answer: str) -> float:
    """1 if the prediction begins with the answer after normalisation: what the published code calls EM.

    An answer of which normalisation leaves nothing matches every prediction, there as here.
    """
    return float(normalize(prediction).startswith(normalize(answer)))


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of the precision and recall of the answer's words (SQuAD v1.1)."""
    predicted, wanted = normalize(prediction).split(), normalize(answer).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_over(metric: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    """The metric against whichever accepted answer fits best."""
    return max(metric(prediction, answer) for answer in answers)


def recall_at_k(retrieved: Sequence[Sequence[str]], wanted: Sequence[str], k: int) -> float:
    """Share of questions whose document is among the first `k` retrieved.

    Args:
        retrieved: for each question, the ids of the retrieved documents, the best first.
        wanted: for each question, the id of the document that answers it.
    """
    return sum(document_id in ids[:k] for ids, document_id in zip(retrieved, wanted)) / len(wanted)
