"""Paired bootstrap: the confidence interval of a difference between two systems on the same questions."""

from __future__ import annotations

from collections.abc import Sequence

from mac_rag.config import Config

RESAMPLES = 10_000


class Interval(Config):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def percent(self) -> str:
        """Mean and interval in percent: `+1.2 (+0.3, +2.1)`."""
        return f"{100 * self.mean:+.1f} ({100 * self.low:+.1f}, {100 * self.high:+.1f})"


def paired_interval(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of `ours - theirs`, question by question, with the percentile interval of 10,000 resamples."""
    import numpy as np

    differences = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    generator = np.random.default_rng(seed)
    count = len(differences)
    # The counts of each question in 500 resamples at a time; the counts of all resamples would not fit into memory.
    means = np.concatenate(
        [
            generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES // 20) @ differences / count
            for _ in range(20)
        ]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(mean=float(differences.mean()), low=float(low), high=float(high))
