"""Adapting to other sets: which there are, and that each is asked about what it holds."""

from __future__ import annotations

from pathlib import Path

from eval.ood import paired
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import generate
from tests.eval.helpers import Command, Evaluate

SIZES = ("--documents", 5, "--methods", "zero-shot,mac")


def test_pairs_contain_all_stories_and_answers() -> None:
    stream = generate("test", 5, seed=1)
    together = paired(stream)
    assert len(together.documents) == 3
    assert " ".join(document.text for document in together.documents) == " ".join(d.text for d in stream.documents)
    texts = {document.id: document.text for document in together.documents}
    assert [question.question for question in together.questions] == [
        question.question for question in stream.questions
    ]
    assert all(question.answers[0] in texts[question.document_id] for question in together.questions)


def test_without_data_it_is_newswire_of_another_form(evaluate: Evaluate) -> None:
    result, _, samples, _ = evaluate("ood", *SIZES)
    assert [(row.settings["dataset"], row.settings["method"]) for row in result.rows] == [
        (name, method) for name in ("newswire", "newswire, two stories") for method in ("Zero-shot", "MAC")
    ]
    assert len({sample.id for sample in samples}) == 10
    assert set(samples[0].rows) == {"newswire: Zero-shot", "newswire: MAC"}


def test_data_sets_are_read_and_must_differ(evaluate: Evaluate, command: Command, tmp_path: Path) -> None:
    for name in ("archivalqa", "other"):
        write_archivalqa(generate("test", 5, seed=1), tmp_path / name / "test.csv")
    data = f"{tmp_path / 'archivalqa'},archivalqa:{tmp_path / 'other'}"
    code, _, errors = command("eval.ood", "--data", data, *SIZES)
    assert code == 1
    assert "twice" in errors
    options = ("--scale", "paper", "--data", tmp_path / "archivalqa")
    code, _, errors = command("eval.ood", *options, *SIZES)
    assert code == 1
    assert "--trained-on" in errors
    rows = evaluate("ood", *options, "--trained-on", tmp_path / "archivalqa", *SIZES).rows
    assert list(rows) == ["archivalqa: Zero-shot", "archivalqa: MAC"]
