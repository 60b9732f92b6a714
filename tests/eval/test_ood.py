"""Adapting to other sets: which there are, and that each is asked about what it holds."""

from __future__ import annotations

from pathlib import Path

from eval.harness.results import Result
from eval.ood import paired
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import generate
from tests.eval.helpers import Command

SIZES = ("--documents", 5, "--methods", "zero-shot,mac", "--output", "r.json")


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


def test_without_data_it_is_newswire_of_another_form(command: Command, tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert command("eval.ood", "--model", tiny_checkpoint, *SIZES)[0] == 0
    result = Result.read(tmp_path / "r.json")
    assert [(row.settings["dataset"], row.settings["method"]) for row in result.rows] == [
        (name, method) for name in ("newswire", "newswire, two stories") for method in ("Zero-shot", "MAC")
    ]
    samples = result.read_samples(tmp_path / "r.json")
    assert len({sample.id for sample in samples}) == 10
    assert set(samples[0].rows) == {"newswire: Zero-shot", "newswire: MAC"}


def test_data_sets_are_read_and_must_differ(command: Command, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("archivalqa", "other"):
        write_archivalqa(generate("test", 5, seed=1), tmp_path / name / "test.csv")
    data = f"{tmp_path / 'archivalqa'},archivalqa:{tmp_path / 'other'}"
    code, _, errors = command("eval.ood", "--model", tiny_checkpoint, "--data", data, *SIZES)
    assert code == 1
    assert "twice" in errors
    options = ("--scale", "paper", "--data", tmp_path / "archivalqa")
    code, _, errors = command("eval.ood", "--model", tiny_checkpoint, *options, *SIZES)
    assert code == 1
    assert "--trained-on" in errors
    options = (*options, "--trained-on", tmp_path / "archivalqa")
    assert command("eval.ood", "--model", tiny_checkpoint, *options, *SIZES)[0] == 0
    rows = Result.read(tmp_path / "r.json").rows
    assert [row.name for row in rows] == ["archivalqa: Zero-shot", "archivalqa: MAC"]
