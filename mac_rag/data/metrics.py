"""Metrics of answers and of retrieval.

Answers: SQuAD's exact match and F1 after normalization, the prefix match of MAC's published code, and the substring
match of evaluations of RAG. Retrieval: recall, mean reciprocal rank and nDCG among the first k documents, with one
right document for each question.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from mac_rag.data.characters import normal_form

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(answer: str) -> str:
    """Lower-cases a text, drops punctuation and articles, and joins its words by single spaces (SQuAD v1.1).

    Examples:
        >>> normalize("The  Golden-Gate Bridge!")
        'goldengate bridge'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def comparable(text: str) -> str:
    """`normalize` of a text's normal form: equal for texts that say the same, however they write their letters.

    For all comparisons but the published metrics.

    Examples:
        >>> comparable("The Jos\u00e9\u2019s") == comparable("JOSE'S")
        True
    """
    return normalize(normal_form(text))


def exact_match(prediction: str, answer: str) -> float:
    """1 if the two are equal after normalization, else 0.

    Examples:
        >>> exact_match("the bridge", "Bridge"), exact_match("a new bridge", "Bridge")
        (1.0, 0.0)
    """
    return float(normalize(prediction) == normalize(answer))


def prefix_match(prediction: str, answer: str) -> float:
    """1 if the prediction starts with the answer after normalization, else 0. The published code calls this EM.

    As in the published code, an answer that normalization leaves empty matches every prediction.

    Examples:
        >>> prefix_match("Anna Berg of Norrland", "Anna Berg"), prefix_match("Berg", "Anna Berg")
        (1.0, 0.0)
    """
    return float(normalize(prediction).startswith(normalize(answer)))


def substring_match(prediction: str, answer: str) -> float:
    """1 if the prediction contains the answer after normalization, else 0: the accuracy of many evaluations of RAG.

    It forgives long answers, which exact match does not. An answer that normalization leaves empty is in every
    prediction.

    Examples:
        >>> substring_match("It was Anna Berg of Norrland.", "Anna Berg"), substring_match("Berg", "Anna Berg")
        (1.0, 0.0)
    """
    return float(normalize(answer) in normalize(prediction))


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the answer's words (SQuAD v1.1), from 0 to 1.

    Examples:
        >>> f1("Berg", "Anna Berg")  # precision 1, recall 1/2
        0.6666666666666666
    """
    predicted, expected = normalize(prediction).split(), normalize(answer).split()
    shared = sum((Counter(predicted) & Counter(expected)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def best_over(metric: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    """The highest value of a metric over all accepted answers.

    Examples:
        >>> best_over(exact_match, "May", ["in May", "May"])
        1.0
    """
    return max(metric(prediction, answer) for answer in answers)


def recall_at_k(retrieved: Sequence[Sequence[str]], gold: Sequence[str], k: int) -> float:
    """Share of questions whose document is among the first `k` retrieved ones.

    Args:
        retrieved: for each question, the ids of the retrieved documents, best first.
        gold: for each question, the id of the document that answers it.
        k: number of retrieved documents that count.

    Examples:
        >>> recall_at_k([["bridge", "river"], ["museum", "bridge"]], ["bridge", "bridge"], k=1)
        0.5
    """
    return sum(document_id in ids[:k] for ids, document_id in zip(retrieved, gold)) / len(gold)


def mrr_at_k(retrieved: Sequence[Sequence[str]], gold: Sequence[str], k: int) -> float:
    """Mean reciprocal rank of each question's document among the first `k`; 0 for one that is not among them.

    Args:
        retrieved, gold, k: as for `recall_at_k`.

    Examples:
        >>> mrr_at_k([["bridge", "river"], ["museum", "bridge"]], ["bridge", "bridge"], k=2)
        0.75
    """
    return sum(1 / rank for rank in _ranks(retrieved, gold, k)) / len(gold)


def ndcg_at_k(retrieved: Sequence[Sequence[str]], gold: Sequence[str], k: int) -> float:
    """Mean normalized discounted cumulative gain (Järvelin and Kekäläinen, 2002) among the first `k` documents.

    The question's document has relevance 1 and all others 0, so the best possible gain is 1.

    Args:
        retrieved, gold, k: as for `recall_at_k`.

    Examples:
        >>> round(ndcg_at_k([["bridge", "river"], ["museum", "bridge"]], ["bridge", "bridge"], k=2), 4)
        0.8155
    """
    return sum(1 / math.log2(1 + rank) for rank in _ranks(retrieved, gold, k)) / len(gold)


def _ranks(retrieved: Sequence[Sequence[str]], gold: Sequence[str], k: int) -> list[int]:
    """The rank, from 1, of each question's document, for the questions where it is among the first `k`."""
    return [
        list(ids[:k]).index(document_id) + 1
        for ids, document_id in zip(retrieved, gold, strict=True)
        if document_id in ids[:k]
    ]
