"""Metrics of confidence: how well it orders answers, and how close it is to the share that is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def auroc(scores: Sequence[float], positive: Sequence[bool]) -> float:
    """The probability that a positive example scores above a negative one; a tie counts half.

    NaN without one of both kinds.

    Examples:
        >>> auroc([0.9, 0.8, 0.8, 0.1], [True, True, False, False])
        0.875
    """
    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    ours, theirs = np.sort(values[labels]), np.sort(values[~labels])
    if not len(ours) or not len(theirs):
        return float("nan")
    below = np.searchsorted(theirs, ours, side="left").sum()
    ties = np.searchsorted(theirs, ours, side="right").sum() - below
    return float((below + ties / 2) / (len(ours) * len(theirs)))


def expected_calibration_error(scores: Sequence[float], right: Sequence[bool], bins: int = 10) -> float:
    """Mean distance between confidence and the share of right answers, over bins of equal width (Naeini et al., 2015).

    Examples:
        >>> expected_calibration_error([0.75, 0.75, 0.75, 0.75, 0.25], [True, True, True, False, False])
        0.05
    """
    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(right, dtype=np.float64)
    place = np.minimum((values * bins).astype(int), bins - 1)
    gaps = [abs((values - labels)[place == number].sum()) for number in range(bins)]
    return float(sum(gaps) / len(values))


def risk_at_coverage(scores: Sequence[float], right: Sequence[bool], coverage: float) -> float:
    """The share of wrong answers among the most confident ones: the risk-coverage curve (El-Yaniv and Wiener, 2010).

    At least one answer counts; where confidence is equal, answers count in equal parts.

    Examples:
        >>> risk_at_coverage([0.9, 0.8, 0.3, 0.2], [True, False, True, False], 0.5)
        0.5
    """
    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(right, dtype=np.float64)
    count = max(1, round(coverage * len(values)))
    least = np.sort(values)[-count]
    above, equal = values > least, values == least
    wrong = (1 - labels[above]).sum() + (1 - labels[equal]).mean() * (count - above.sum())
    return float(wrong / count)
