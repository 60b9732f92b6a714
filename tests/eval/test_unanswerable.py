"""Metrics of confidence against plain loops, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.unanswerable import auroc, expected_calibration_error, risk_at_coverage
from mac_rag.model import MACModel
from tests.eval.helpers import Command, Evaluate
from tests.pipelines.helpers import command as pipeline

ANSWERS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=1, max_size=30)


@given(ANSWERS)
def test_metrics_are_their_definitions(answers: list[tuple[float, bool]]) -> None:
    scores, right = [score for score, _ in answers], [is_right for _, is_right in answers]
    ours = [score for score, is_right in answers if is_right]
    theirs = [score for score, is_right in answers if not is_right]
    if ours and theirs:
        wins = sum((a > b) + 0.5 * (a == b) for a in ours for b in theirs)
        assert auroc(scores, right) == pytest.approx(wins / len(ours) / len(theirs))
    error = 0.0
    for number in range(10):
        bin_ = [(s, r) for s, r in answers if min(int(s * 10), 9) == number]
        if bin_:
            gap = abs(sum(s for s, _ in bin_) / len(bin_) - sum(r for _, r in bin_) / len(bin_))
            error += gap * len(bin_) / len(answers)
    assert expected_calibration_error(scores, right) == pytest.approx(error)
    assert risk_at_coverage(scores, right, 1.0) == pytest.approx(right.count(False) / len(right))
    assert 0 <= risk_at_coverage(scores, right, 0.5) <= 1


def test_a_fit_and_its_measurement_are_two_commands(evaluate: Evaluate, command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    MACModel.from_pretrained("mac-tiny").save_pretrained(folder)
    options = ("--documents", "50", "--questions", "50")
    code, _, told = command("eval.unanswerable", "--model", str(folder), *options)
    assert code == 1
    assert "python -m pipelines.calibrate" in told
    fitted = pipeline("pipelines.calibrate", "--model", str(folder), "--data", "newswire", *options)
    assert fitted.exit_code == 0, fitted.output
    assert "fitted on 50 answers" in fitted.output
    result, rows, samples, _ = evaluate("unanswerable", *options, model=folder)
    first = result.rows[0]
    assert first.name == "memory: confidence"
    assert first.measures["auroc"] > 0.8
    assert first.measures["risk_at_100"] <= 1 - (first.em or 0)
    assert set(rows) >= {"memory: prior alone", "memory: log_probability alone"}
    assert len(samples) == 50
