"""The metrics against the definitions of the official SQuAD v1.1 evaluation, restated here."""

from __future__ import annotations

import math
import re
import string
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mac_rag.data.metrics import (
    best_over,
    exact_match,
    f1,
    mrr_at_k,
    ndcg_at_k,
    normalize,
    prefix_match,
    recall_at_k,
    substring_match,
)


def official_normalize(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def official_exact_match(prediction: str, truth: str) -> bool:
    return official_normalize(prediction) == official_normalize(truth)


def official_f1(prediction: str, truth: str) -> float:
    prediction_tokens = official_normalize(prediction).split()
    truth_tokens = official_normalize(truth).split()
    same = sum((Counter(prediction_tokens) & Counter(truth_tokens)).values())
    if same == 0:
        return 0
    precision = 1.0 * same / len(prediction_tokens)
    recall = 1.0 * same / len(truth_tokens)
    return (2 * precision * recall) / (precision + recall)


def published_match(prediction: str, truth: str) -> bool:
    """What the published code of the paper calls exact match."""
    truth = official_normalize(truth)
    return official_normalize(prediction)[: len(truth)] == truth


# Words that normalisation changes or removes, so that overlaps and empty remainders come up often.
WORDS = st.sampled_from(
    ["the", "The", "an", "A", "theatre", "U.S.", "us", "1,000", "1000", "—", "!?", "don't", "İstanbul"]
)
ANSWERS = st.lists(WORDS, max_size=6).map(" ".join) | st.text()


@given(ANSWERS, ANSWERS)
@example("", "")
@example("the", "an")
@example("...", "")
@example("the cat", "")
@example("", "the cat")
@example("a a b", "a b b")
@example("ﬁn\u00a0de\u2003siècle", "FIN de siècle")
@example("the-an", "thean")
@example("THE\u0130", "the i\u0307")
def test_metrics_equal_the_official_definitions(prediction: str, answer: str) -> None:
    assert normalize(prediction) == official_normalize(prediction)
    assert exact_match(prediction, answer) == official_exact_match(prediction, answer)
    assert f1(prediction, answer) == official_f1(prediction, answer)
    assert prefix_match(prediction, answer) == published_match(prediction, answer)
    assert substring_match(prediction, answer) == (official_normalize(answer) in official_normalize(prediction))


@given(ANSWERS, st.lists(ANSWERS, min_size=1, max_size=4))
def test_best_over_takes_the_answer_that_fits_best(prediction: str, answers: list[str]) -> None:
    for metric in (exact_match, f1, prefix_match):
        assert best_over(metric, prediction, answers) == max(metric(prediction, answer) for answer in answers)


RANKING = st.tuples(st.permutations(list("abcdef")), st.integers(0, 6), st.sampled_from("abcdef"))


@given(st.lists(RANKING, min_size=1), st.integers(1, 7))
def test_ranking_metrics_are_their_definitions(drawn: list[tuple[list[str], int, str]], k: int) -> None:
    retrieved, gold = [ids[:length] for ids, length, _ in drawn], [document_id for _, _, document_id in drawn]
    reciprocal, gains = 0.0, 0.0
    for ids, document_id in zip(retrieved, gold):
        relevance = [float(found == document_id) for found in ids[:k]]
        reciprocal += max((value / rank for rank, value in enumerate(relevance, 1)), default=0.0)
        ideal = 1.0 / math.log2(2)  # the relevant document first
        gains += sum(value / math.log2(rank + 1) for rank, value in enumerate(relevance, 1)) / ideal
    assert recall_at_k(retrieved, gold, k) == sum(name in ids[:k] for ids, name in zip(retrieved, gold)) / len(drawn)
    assert mrr_at_k(retrieved, gold, k) == pytest.approx(reciprocal / len(drawn))
    assert ndcg_at_k(retrieved, gold, k) == pytest.approx(gains / len(drawn))
