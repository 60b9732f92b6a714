"""The commands that compare systems, on their own data and on other sets: what they run, write and refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.baselines.camels import CamelsConfig
from eval.baselines.ccm import CCMConfig
from eval.baselines.factory import BaselineSetup, SystemFactory
from eval.baselines.options import METHODS
from eval.ood import paired
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from tests.eval.helpers import Command, Evaluate

SMALL = BaselineSetup(
    training_documents=8,
    validation_documents=3,
    rates=(1e-4, 1e-3),
    retention_rate=1e-4,
    camels=CamelsConfig(steps=1, accumulate=1),
    ccm=CCMConfig(steps=1, batch_size=2),
)


def factory(model: MACModel, folder: Path, setup: BaselineSetup = SMALL) -> SystemFactory:
    return SystemFactory(model, setup, lambda: generate("train", 8), lambda: generate("val", 3), folder=folder)


def test_every_method_makes_a_system_that_adapts_and_answers(tiny_model: MACModel, tmp_path: Path) -> None:
    made = factory(tiny_model, tmp_path)
    stream = generate("test", 3)
    names = []
    for method in METHODS:
        system = made.make(method)
        system.adapt(stream.documents)
        assert len(system.answer([question.question for question in stream.questions])) == 3
        names.append(system.name)
    assert len(set(names)) == len(METHODS)
    assert {"Uniform", "Salient Spans", "CaMeLS", "CCM + encoder retriever", "MAC", "5-shot", "Zero-shot"} < set(names)
    assert {len(found) for found in made.searched.values()} == {2}
    assert len(made.searched) == 3
    with pytest.raises(ConfigError, match="unknown method 'magic'"):
        made.make("magic")


def test_main_table(evaluate: Evaluate) -> None:
    options = ("--documents", 6, "--questions", 5, "--learning-rate", 1e-3, "--methods", "zero-shot,uniform,mac")
    result, rows, samples, shown = evaluate("main_table", *options, "--seed", 2)
    assert shown.splitlines()[0] == "newswire: 6 documents, 5 questions, generated"
    assert list(rows) == ["Zero-shot", "Uniform", "MAC"]
    assert rows["Uniform"].settings == {"method": "Uniform", "learning_rate": 1e-3}
    assert (rows["MAC"].documents, rows["MAC"].questions) == (6, 5)
    assert (result.experiment, result.scale, result.seed) == ("main_table", "tiny", 2)
    assert samples == evaluate("main_table", *options, "--seed", 2).samples


def test_retention(evaluate: Evaluate) -> None:
    options = ("--methods", "uniform,mac", "--first", 3, "--further", 5, "--step", 2)
    result, rows, _, _ = evaluate("retention", *options)
    assert list(rows) == [f"{name}, +{added}" for name in ("Uniform", "MAC") for added in (0, 2, 4, 5)]
    assert [row.settings["added"] for row in rows.values()] == [0, 2, 4, 5] * 2
    assert [row.documents for row in rows.values()] == [3, 5, 7, 8] * 2
    assert {row.questions for row in rows.values()} == {3}
    for name in ("Uniform", "MAC"):
        first = rows[f"{name}, +0"].f1
        for added in (0, 2, 4, 5):
            row = rows[f"{name}, +{added}"]
            assert row.settings["method"] == name
            if first:
                assert row.measures["retention"] == pytest.approx(100 * row.f1 / first)
            else:
                assert "retention" not in row.measures
                assert f"retention of {name.lower()}" in result.not_run


def test_adaptation_cost(evaluate: Evaluate) -> None:
    rows = evaluate("adaptation_cost", "--documents", 3).rows
    assert list(rows) == ["Uniform", "Salient Spans", "CaMeLS", "CCM + encoder retriever", "MAC"]
    for row in rows.values():
        assert row.measures["peak_mb"] > row.measures["networks_mb"] > 0
        assert row.measures["minutes"] == pytest.approx(1665 * row.measures["seconds_per_document"] / 60)
    # Fine-tuning holds the weights, their gradients and both moments of Adam.
    assert rows["Uniform"].measures["peak_mb"] > 4 * rows["Uniform"].measures["networks_mb"]
    assert rows["CaMeLS"].measures["peak_mb"] > rows["Uniform"].measures["peak_mb"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval.main_table", "--methods", "uniform,magic"), "--methods 'uniform,magic': choose among"),
        (("eval.main_table", "--scale", "paper"), "--scale paper runs on the paper's data sets"),
        (("eval.main_table", "--model", "mac-nowhere", "--documents", 3), "no MAC model 'mac-nowhere'"),
        (("eval.retention", "--methods", "zero-shot"), "choose among uniform"),
        (("eval.adaptation_cost", "--data", "squad:nowhere"), "nowhere"),
    ],
)
def test_refusals(command: Command, tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    code, _, errors = command(*arguments)
    assert code == 1
    assert message in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.rglob("*.json"))


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
