"""Paired bootstrap: how sure a difference between two ways of answering the same questions is."""

from __future__ import annotations

from collections.abc import Sequence

from mac_rag.config import Config

RESAMPLES = 10_000


class Interval(Config):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def paired_interval(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Interval:
    """The mean of `ours - theirs` over the questions, with the percentile interval of 10,000 resamples of them.

    Args:
        ours, theirs: the figure of each question, in the same order; at least one.
        seed: of the resampling.
    """
    import numpy as np

    differences = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    generator = np.random.default_rng(seed)
    count = len(differences)
    # How often each question is drawn; some at a time, for all of them would not fit into memory.
    means = np.concatenate(
        [
            generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES // 20) @ differences / count
            for _ in range(20)
        ]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(mean=float(differences.mean()), low=float(low), high=float(high))
