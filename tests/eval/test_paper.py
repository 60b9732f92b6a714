"""Running all experiments of the paper: the steps, the trained models that they need, and what becomes of failures."""

from __future__ import annotations

import importlib
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from eval.harness import paper_plan as plan
from eval.harness.paper_plan import (
    DATASETS,
    PLANS,
    QUESTIONS,
    TUNING_SPLITS,
    Step,
    StepRecord,
    TrainedModel,
    argument,
    models_needed,
    models_to_train,
    read_records,
    steps,
    trained_on,
    write_records,
)
from eval.harness.results import Result, checkout
from eval.harness.scales import SCALES, Scale
from eval.paper import finished, run_steps
from eval.report.catalogue import CATALOGUE
from mac_rag.data import SPLITS
from mac_rag.errors import DataError
from mac_rag.model import MACModel
from mac_rag.model.presets import PAPER
from pipelines.recipe import load_recipe
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig
from tests.eval.helpers import Command, result, scored
from tests.helpers import DEEP, DIGITS


def on(checkpoint: Path) -> Step:
    arguments = ("--model", str(checkpoint), "--sizes", "3", "--questions", "3")
    return Step("bank_size", "bank_size", arguments)


class TestRun:
    @pytest.mark.slow
    def test_continues_after_failures_and_repeats_no_finished_step(
        self, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        planned = [
            Step("lost", "bank_size", ("--sizes", "none")),
            Step("elsewhere", "ood", (), missing="no folder squad in --data"),
            on(tiny_checkpoint),
        ]
        records = run_steps(planned, tmp_path, jobs=2)
        assert [(record.name, record.status) for record in records] == [
            ("lost", "failed"),
            ("elsewhere", "not run"),
            ("bank_size", "done"),
        ]
        assert records[0].reason == "--sizes takes whole numbers separated by commas, got 'none'"
        assert records[1].reason == "no folder squad in --data"
        assert Result.read(tmp_path / "bank_size.json").command == planned[2].shown(tmp_path)
        assert "Generated newswire" in (tmp_path / "bank_size.log").read_text()
        assert read_records(tmp_path) == records
        assert "[1/3] lost\n" in capsys.readouterr().out

        written = (tmp_path / "bank_size.json").stat().st_mtime_ns
        again = run_steps(planned[1:], tmp_path)
        assert again[1] == records[2]
        assert (tmp_path / "bank_size.json").stat().st_mtime_ns == written
        assert "[2/2] bank_size: done before" in capsys.readouterr().out

    def test_steps_run_side_by_side(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        both = threading.Barrier(2, timeout=30)
        monkeypatch.setattr("eval.paper.run_step", lambda step, *_: f"{step.name} is {bool(both.wait() < 2)}")
        planned = [Step(name, "bank_size", ()) for name in ("one", "two")]
        assert [record.reason for record in run_steps(planned, tmp_path, jobs=2)] == ["one is True", "two is True"]

    def test_results_of_others_do_not_count(self, tiny_checkpoint: Path, tiny_model: MACModel, tmp_path: Path) -> None:
        step, commit = on(tiny_checkpoint), checkout()
        digest = MACModel.from_pretrained(str(tiny_checkpoint)).answer_digest
        named = {"name": str(tiny_checkpoint), "answer_digest": digest}
        mine = result("bank_size").model.model_copy(update=named)
        made = result("bank_size", command=step.shown(tmp_path), git=commit, model=mine)
        assert not finished(step, tmp_path, commit)
        made.write(step.result(tmp_path))
        assert finished(step, tmp_path, commit)
        assert not finished(replace(step, arguments=("--seed", "1")), tmp_path, commit)
        assert not finished(step, tmp_path, None if commit else result("x").git)
        for other in ({"answer_digest": "00"}, {"name": str(tmp_path / "gone")}):
            made.model_copy(update={"model": mine.model_copy(update=other)}).write(step.result(tmp_path))
            assert not finished(step, tmp_path, commit)
        step.result(tmp_path).write_text("{")
        assert not finished(step, tmp_path, commit)

    @pytest.mark.parametrize("content", ["[1]", "1", DEEP, f"[{DIGITS}]"])
    def test_damaged_records_are_named(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "steps.json").write_text(content)
        with pytest.raises(DataError, match=r"steps\.json is damaged"):
            read_records(tmp_path)


class TestCommand:
    def test_failures_are_reported(self, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def planned(scale: str, data: Path | None, seed: int) -> list[Step]:
            return [Step("peft", "peft", (), missing="no time"), Step("gone", "nowhere", ())]

        monkeypatch.setattr(plan, "steps", planned)
        (tmp_path / "out").mkdir()
        result("archivalqa", [scored("MAC", 0.5)]).write(tmp_path / "out" / "archivalqa.json")
        code, shown, errors = command("eval.paper", "--output", "out")
        assert code == 1
        assert "0 done, 1 failed, 1 not run" in shown
        assert "failed: gone: " in errors
        assert "eval.nowhere" in errors
        assert "peft: not run, no time" in (tmp_path / "out" / "report.html").read_text()

    @pytest.mark.parametrize("datasets", [("streamingqa",), ()])
    def test_a_dry_run_shows_what_would_run(self, command: Command, tmp_path: Path, datasets: tuple[str, ...]) -> None:
        for name in datasets:
            (tmp_path / "data" / name).mkdir(parents=True)
        data = ("--data", tmp_path / "data") if datasets else ()
        code, shown, _ = command("eval.paper", "--scale", "paper", "--dry-run", *data)
        assert code == 0
        planned = plan.steps("paper", Path(data[1]) if data else None, 0)
        for number, step in enumerate(planned, 1):
            assert f"[{number}/{len(planned)}] {step.name}" in shown
        named = [{Path(text).name for text in step.arguments} & set(DATASETS) for step in planned]
        waiting = sum(not names <= set(datasets) for names in named)
        assert f"{len(planned)} steps: {waiting} wait for data; " in shown
        assert shown.count("data that you bring") == waiting
        assert "python -m pipelines.train --config gpt2-xl/tune_qa --output runs/gpt2-xl/tune_qa " in shown
        assert not (tmp_path / "results").exists()

    def test_refusals(self, command: Command, tmp_path: Path) -> None:
        code, _, errors = command("eval.paper", "--scale", "paper", "--data", tmp_path)
        assert code == 1
        assert "none of the folders" in errors
        code, _, errors = command("eval.paper", "--data", tmp_path)
        assert code == 1
        assert f"--data {tmp_path} is for --scale paper" in errors
        assert command("eval.paper", "--scale", "huge")[0] == 2
        (tmp_path / "file").touch()
        code, _, errors = command("eval.paper", "--output", tmp_path / "file")
        assert code == 1
        assert "cannot be written" in errors


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    record = StepRecord(name="peft", experiment="peft", status="failed", reason="no time")
    write_records(tmp_path, [record])
    assert read_records(tmp_path) == [record]


def folders(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
    return path


def test_every_experiment_has_a_place_in_the_report_and_a_step() -> None:
    assert {entry.experiment for entry in PLANS} == {experiment.name for experiment in CATALOGUE}


def test_the_tiny_scale_needs_no_data_and_runs_every_experiment_but_those_of_a_data_set() -> None:
    planned = steps("tiny", None, 0)
    assert not any(step.missing or "--data" in step.arguments for step in planned)
    assert {entry.experiment for entry in PLANS} - {step.name for step in planned} == {"squad", "streamingqa"}


def test_the_papers_scale_runs_on_its_data_sets_only(tmp_path: Path) -> None:
    assert all(step.missing for step in steps("paper", None, 0))
    planned = steps("paper", folders(tmp_path, *DATASETS), 0)
    assert not any(step.missing for step in planned)
    assert all("--data" in step.arguments for step in planned)
    table = {f"main_table-{model}-{name}" for model in PAPER for name in DATASETS}
    assert table == {step.name for step in planned if step.experiment == "main_table"}
    assert {step.name for step in planned if step.experiment in DATASETS} == {"archivalqa"}  # as in table 2
    for step in planned:
        tables = step.experiment in {"main_table", "archivalqa", "ood", "peft", "amortization", "quantization"}
        assert ("published" in step.arguments) == tables


@pytest.mark.parametrize("scale", SCALES)
def test_names_are_unique_and_options_exist(tmp_path: Path, scale: Scale) -> None:
    planned = steps(scale, folders(tmp_path, *DATASETS) if scale == "paper" else None, 3)
    assert len({step.name for step in planned}) == len(planned)
    for step in planned:
        app = typer.Typer()
        module, *arguments = step.command(tmp_path)
        app.command()(importlib.import_module(module).main)
        command = typer.main.get_command(app)
        command.make_context(step.name, list(arguments))  # stops at what the command would refuse
        assert arguments[arguments.index("--seed") + 1] == "3"


PATHS = [
    "runs/gpt2-xl/train/best",
    "runs/gpt2-xl/train-squad/best",
    "runs/llama2-7b/train-joint/best",
    "runs/llama2-7b/tune_qa-joint-archivalqa/best",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_says_what_the_model_is(path: str) -> None:
    model = TrainedModel.of(path)
    assert model.path == path
    assert f"--output {model.folder} " in model.command(Path("data"))


def test_the_same_model_on_other_data() -> None:
    assert trained_on("runs/gpt2-xl/train/best", "squad") == "runs/gpt2-xl/train-squad/best"
    assert trained_on("runs/gpt2-xl/train-squad/best", "streamingqa") == "runs/gpt2-xl/train/best"
    assert trained_on("runs/llama2-7b/train-joint/best", "archivalqa") == "runs/llama2-7b/train-joint-archivalqa/best"


def paper_step(name: str) -> Step:
    return next(step for step in steps("paper", None, 0) if step.name == name)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        (
            "main_table-gpt2-xl-squad",
            {"runs/gpt2-xl/train-squad/best", "runs/gpt2-xl/tune_qa-squad/best", "runs/distilgpt2/tune_qa-squad/best"},
        ),
        ("main_table-llama2-7b-squad", {"runs/llama2-7b/train-squad/best", "runs/llama2-7b/tune_qa-squad/best"}),
        ("quantization-squad", {"runs/llama2-7b/tune_qa-squad/best"}),
        ("hierarchical-archivalqa", {"runs/gpt2-xl/train-archivalqa/best"}),
    ],
)
def test_a_step_names_the_models_that_it_loads(name: str, needed: set[str]) -> None:
    assert set(models_needed(paper_step(name))) == needed


@pytest.mark.parametrize("name", PAPER)
def test_baselines_start_from_the_models_own_lm_unless_it_is_in_4_bit(name: str) -> None:
    """A second copy of a large LM costs gigabytes."""
    lm = argument(paper_step(f"main_table-{name}-squad"), "--lm")
    assert lm == (None if PAPER[name].base_lm.quantization == "none" else f"runs/{name}/tune_qa-squad/best")


def test_models_are_trained_once_and_after_their_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = ["runs/gpt2-xl/train/best", "runs/gpt2-xl/tune_qa/best", "runs/gpt2-xl/train/best"]
    lm, model = models_to_train(paths)
    assert [lm.path, model.path] == ["runs/gpt2-xl/tune_qa/best", "runs/gpt2-xl/train/best"]
    Path(lm.path).mkdir(parents=True)
    assert models_to_train(paths) == [model]


@pytest.mark.parametrize("dataset", TUNING_SPLITS)
@pytest.mark.parametrize("name", PAPER)
def test_every_recipe_takes_the_values_of_every_data_set(name: str, dataset: str) -> None:
    joint = [False, True] if name == "llama2-7b" else [False]
    for model in (TrainedModel(name, task, each, dataset) for task in ("train", "tune_qa") for each in joint):
        kind = TrainConfig if model.task == "train" else TuneConfig
        recipe = load_recipe(kind, model.recipe, list(model.overrides(Path("data") / dataset)))
        assert isinstance(recipe, TrainConfig | TuneConfig)
        assert (recipe.data.name, recipe.data.path) == (dataset, f"data/{dataset}")
        assert {recipe.data.train, recipe.data.val} <= set(SPLITS[dataset])
        if isinstance(recipe, TrainConfig):  # 50 passes over the questions
            documents = recipe.trainer.batch_size * recipe.trainer.accumulate * recipe.trainer.steps
            assert documents == pytest.approx(50 * QUESTIONS[dataset], rel=0.01)
        if model.joint:
            assert recipe.context.gold_rate is None
            assert recipe.trainer.gradient_checkpointing
            assert (recipe.context.retriever, recipe.context.k) == ("bm25", (1, 3, 5))
        else:
            assert recipe.context.retriever == "none"
        if isinstance(recipe, TrainConfig):
            assert recipe.model.base_lm.name == f"{model.starts_from.folder if model.starts_from else ''}/best"
            assert recipe.model.base_lm.quantization == ("nf4" if name in ("gpt2-xl", "llama2-7b") else "none")
