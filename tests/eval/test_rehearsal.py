"""`python -m eval.paper --dry-run`: every step of the paper's scale is walked through without data or weights."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from eval.harness.paper_models import TrainedModel
from eval.harness.paper_plan import DATASETS, Step, steps
from eval.harness.paper_rehearsal import models_to_train, rehearse, training_use
from eval.paper import refusal, trained_variants
from tests.eval.helpers import Command

BILLION = 1_000_000_000


def folders(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
    return path


@pytest.mark.slow
class TestCommand:
    @pytest.mark.parametrize("datasets", [DATASETS, ("streamingqa",), ()])
    def test_no_step_of_the_papers_scale_fails_by_our_fault(
        self, command: Command, tmp_path: Path, datasets: tuple[str, ...]
    ) -> None:
        data = ("--data", folders(tmp_path / "data", *datasets)) if datasets else ()
        code, shown, errors = command("eval.paper", "--scale", "paper", "--dry-run", *data)
        assert code == 0
        assert not errors
        planned = steps("paper", Path(data[1]) if data else None, 0)
        for number, step in enumerate(planned, 1):
            assert f"[{number}/{len(planned)}] {step.name}" in shown
        waiting = sum(not set(_datasets(step)) <= set(datasets) for step in planned)
        assert f"{len(planned)} steps: {waiting} wait for data, 0 cannot run" in shown
        assert shown.count("data that you bring") == waiting
        assert "python -m pipelines.tune_qa --config gpt2-xl/tune_qa --output runs/gpt2-xl/tune_qa " in shown
        assert not (tmp_path / "results").exists()

    def test_the_tiny_scale(self, command: Command) -> None:
        code, shown, _ = command("eval.paper", "--dry-run")
        assert code == 0
        assert "0 cannot run; 0 models to train first" in shown


def _datasets(step: Step) -> list[str]:
    return [Path(text).name for text in step.arguments if Path(text).name in DATASETS]


def paper_step(name: str) -> Step:
    return next(step for step in steps("paper", None, 0) if step.name == name)


def test_a_step_names_the_models_that_it_loads_and_their_sizes() -> None:
    [found] = rehearse([paper_step("main_table-squad")], "paper", {})
    assert set(found.needs) == {
        "runs/gpt2-xl/train-squad/best", "runs/gpt2-xl/tune_qa-squad/best", "runs/distilgpt2/tune_qa/best",
    }  # fmt: skip
    assert not found.fault
    asks, updates, proxy = found.uses
    assert (round(asks.weights / BILLION, 2), round(updates.weights / BILLION, 2)) == (2.81, 1.56)
    assert updates.bytes == 16 * updates.weights  # weights, gradients and two moments in fp32
    assert proxy.weights == 81_912_576
    order = [model.path for model in models_to_train([found])]
    assert order.index("runs/gpt2-xl/tune_qa-squad/best") < order.index("runs/gpt2-xl/train-squad/best")


@pytest.mark.slow
def test_variants_are_planned_as_their_commands_train_them() -> None:
    [found] = rehearse([paper_step("quantization-squad")], "paper", trained_variants())
    whole, in_4_bit, _ = found.uses
    assert whole.weights == in_4_bit.weights
    assert whole.bytes - in_4_bit.bytes > 9 * BILLION  # of 6.7 billion weights from 2 bytes to little more than half
    assert set(found.needs) == {"runs/llama2-7b/tune_qa-squad/best"}


def test_a_model_that_is_there_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [found] = rehearse([paper_step("hierarchical-archivalqa")], "paper", {})
    assert [model.path for model in models_to_train([found])] == [
        "runs/gpt2-xl/tune_qa-archivalqa/best",
        "runs/gpt2-xl/train-archivalqa/best",
    ]
    (tmp_path / "runs/gpt2-xl/tune_qa-archivalqa/best").mkdir(parents=True)
    [left] = models_to_train([found])
    assert left.path == "runs/gpt2-xl/train-archivalqa/best"


def test_trainings_are_those_of_the_recipes() -> None:
    use = training_use(TrainedModel.of("runs/distilgpt2/train/best"), Path("data"))
    assert use.what == "trains runs/distilgpt2/train/best"
    assert use.bytes > 20 * BILLION  # 64 documents in fp32


def test_faults_are_told(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = paper_step("hierarchical-archivalqa")
    unknown = replace(step, arguments=("--model", "runs/gpt9/train/best"))
    [found] = rehearse([unknown], "paper", {})
    assert "unknown preset 'gpt9'" in found.fault
    assert re.search("No such option: --depth", refusal(replace(step, arguments=("--depth", "3")), tmp_path))
    assert "there is no eval.nowhere" in refusal(Step("x", "nowhere", ()), tmp_path)
    assert not refusal(step, tmp_path)
    monkeypatch.setattr("eval.harness.paper_plan.steps", lambda *_: [unknown])
    code, shown, errors = command("eval.paper", "--scale", "paper", "--dry-run")
    assert code == 1
    assert "cannot run: unknown preset 'gpt9'" in errors
    assert "1 cannot run" in shown
