"""The paired bootstrap against a plain loop and against what is known of intervals."""

from __future__ import annotations

import random

import pytest

from eval.harness.bootstrap import paired_interval


def test_is_a_resampling_of_paired_differences() -> None:
    rng = random.Random(0)
    ours, theirs = ([rng.random() for _ in range(40)] for _ in range(2))
    differences = [a - b for a, b in zip(ours, theirs)]
    means = sorted(sum(rng.choices(differences, k=40)) / 40 for _ in range(10_000))
    interval = paired_interval(ours, theirs)
    assert interval.mean == pytest.approx(sum(differences) / 40)
    assert interval.low == pytest.approx(means[250], abs=0.01)
    assert interval.high == pytest.approx(means[9750], abs=0.01)


def test_a_constant_difference_has_an_interval_of_no_width() -> None:
    interval = paired_interval([1.0, 0.5, 0.75], [0.5, 0.0, 0.25])
    assert (interval.low, interval.mean, interval.high) == pytest.approx((0.5, 0.5, 0.5))


def test_is_repeatable_by_its_seed() -> None:
    ours, theirs = [0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0, 0.0]
    assert paired_interval(ours, theirs, seed=3) == paired_interval(ours, theirs, seed=3)
    assert paired_interval(ours, ours) == paired_interval(theirs, theirs)
