"""Comparing results: over which questions, which rows, by the paired bootstrap, and what is refused."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from eval.compare import compare, shared_samples
from eval.harness.bootstrap import paired_interval
from eval.harness.results import Data, Result, Sample
from tests.eval.helpers import Command, result, samples

OURS, THEIRS = [1.0, 0.5, 1.0, 0.0], [0.0, 0.5, 1.0, 0.25]


def write(folder: Path, name: str, **scores: list[float]) -> Path:
    result("squad").write(folder / name, samples(scores))
    return folder / name


def test_is_the_paired_bootstrap_over_the_shared_questions() -> None:
    """B lacks the first question of A and asked two more."""
    ours, theirs = samples({"MAC": OURS}), samples({"MAC": [*THEIRS[1:], 1.0, 1.0]}, first=1)
    pairs = shared_samples(ours, theirs[::-1], Path("a"), Path("b"))
    f1 = next(entry for entry in compare(pairs, [("MAC", "MAC")], seed=3) if entry.figure == "f1")
    assert (f1.ours, f1.theirs) == (sum(OURS[1:]) / 3, sum(THEIRS[1:]) / 3)
    assert f1.interval == paired_interval(OURS[1:], THEIRS[1:], seed=3)


def test_shows_the_shared_rows_or_the_chosen_ones(command: Command, tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.json", MAC=OURS, other=OURS), write(tmp_path, "b.json", MAC=THEIRS, Uniform=[0.0] * 4)
    code, shown, _ = command("eval.compare", a, b)
    assert code == 0
    assert "4 questions" in shown
    assert "│ MAC " in shown
    assert "other" not in shown
    assert re.search(r"MAC │ EM +│ 50.0 │ 25.0 │ +\+25.0", shown)
    code, shown, _ = command("eval.compare", a, b, "--row", "MAC", "--against", "Uniform")
    assert code == 0
    assert "MAC / Uniform" in shown
    code, shown, _ = command("eval.compare", a, a, "--row", "MAC", "--against", "other")
    assert "+0.0 (+0.0, +0.0)" in shown


def test_long_names_of_rows_cut_no_figure(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "first 3 rows' tokens side by side"
    a = write(tmp_path, "a.json", **{long: OURS, "right document's text": THEIRS})
    code, shown, _ = command("eval.compare", a, a, "--row", long, "--against", "right document's text")
    assert code == 0
    assert "…" not in shown
    interval = paired_interval(OURS, THEIRS)
    low, mean, high = (f"{100 * figure:+.1f}" for figure in (interval.low, interval.mean, interval.high))
    assert f"│ 62.5 │ 43.8 │ {mean} ({low}, {high}) │" in shown


def test_says_which_questions_were_left_out(command: Command, tmp_path: Path) -> None:
    a = write(tmp_path, "a.json", MAC=OURS)
    result("squad").write(tmp_path / "b.json", samples({"MAC": THEIRS}, first=1))
    _, shown, _ = command("eval.compare", a, tmp_path / "b.json")
    assert f"1 of the 4 questions of {a} were not asked in the other" in shown


SQUAD = Data(name="squad", split="dev", source="folder", documents=7, questions=4)
ANSWERED = samples({"MAC": THEIRS})


@pytest.mark.parametrize(
    ("other", "answered", "message"),
    [
        (result("squad", data=SQUAD), ANSWERED, "different data"),
        (
            result("squad"),
            [sample.model_copy(update={"question": "Who?"}) for sample in ANSWERED],
            "different questions: 'q0' is 'What is 0?'",
        ),
        (result("squad"), samples({"MAC": THEIRS}, first=100), "no question in common"),
        (result("dropout_memory"), [], "(dropout_memory) asked no questions"),
        (result("squad"), samples({"Uniform": THEIRS}), "no row has the same name"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(
    command: Command, tmp_path: Path, other: Result, answered: list[Sample], message: str
) -> None:
    a, b = write(tmp_path, "a.json", MAC=OURS), tmp_path / "b.json"
    other.write(b, answered)
    assert message in refused(command, a, b)


def refused(command: Command, *arguments: object) -> str:
    code, _, errors = command("eval.compare", *arguments)
    assert code == 1
    assert "Traceback" not in errors
    return errors


def test_rows_and_files_that_are_not_there_are_named(command: Command, tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.json", MAC=OURS), write(tmp_path, "b.json", Uniform=THEIRS)
    assert "no answers of row 'nobody'; it has ['MAC']" in refused(command, a, b, "--row", "nobody")
    assert "no answers of row 'nobody'; it has ['Uniform']" in refused(command, a, b, "--against", "nobody")
    (tmp_path / "old.json").write_text('{"schema_version": 2}')
    assert "schema version 2" in refused(command, a, tmp_path / "old.json")
    assert "cannot be read" in refused(command, tmp_path / "nowhere.json", a)
    for arguments in ((), ("a.json",)):
        assert command("eval.compare", *arguments)[0] == 2


def test_is_a_resampling_of_paired_differences() -> None:
    rng = random.Random(0)
    ours, theirs = ([rng.random() for _ in range(40)] for _ in range(2))
    differences = [a - b for a, b in zip(ours, theirs)]
    means = sorted(sum(rng.choices(differences, k=40)) / 40 for _ in range(10_000))
    interval = paired_interval(ours, theirs)
    assert interval.mean == pytest.approx(sum(differences) / 40)
    assert interval.low == pytest.approx(means[250], abs=0.01)
    assert interval.high == pytest.approx(means[9750], abs=0.01)
