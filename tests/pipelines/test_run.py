"""One command runs a pipeline: all stages in order, no stage twice, and a stage that was killed goes on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from pipelines.recipe import load_recipe
from pipelines.stages import RECIPES, read_stages
from pipelines.tasks.registry import TASK_KINDS
from pipelines.tasks.train import TrainTask
from pipelines.tasks.tune_qa import TuneConfig
from tests.pipelines.helpers import SHORT_PRETRAINING, TRAINER, command, metrics
from tests.processes import run_in_process

STAGES = ("lm", "reader", "start", "more")
MINIATURE = """
shared:
  data: &data {name: newswire, documents: 40, validation_documents: 6}
  trainer: &trainer
    {steps: 4, batch_size: 3, learning_rate: 1.0e-3, validate_every: 2, save_every: 2, cpu: true}
stages:
  lm:
    task: pretrain
    trainer: *trainer
  reader:
    task: tune_qa
    base_lm: {name: "${stages.lm}/last"}
    data: *data
    trainer: {<<: *trainer, best: f1}
  start:
    task: train
    model:
      base_lm: {name: "${stages.reader}/best"}
      amortization: {design: decoder-only, name: null}
      input_encoder: {design: decoder-only, name: null}
      tokens: 3
      max_new_tokens: 4
      aggregation: {blocks: 1, heads: 2, head_width: 8}
    data: *data
    trainer: &mac_trainer {<<: *trainer, best: loss}
  more:
    task: train
    start_from: ${stages.start}/last
    data: *data
    trainer: {<<: *mac_trainer, seed: 1}
"""


def run(file: Path, output: Path, *options: str) -> Any:
    with patch.multiple("pipelines.tasks.pretrain", **SHORT_PRETRAINING):
        return command("pipelines.run", str(file), "--output", str(output), *options)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("file"), MINIATURE)


@pytest.fixture(scope="module")
def whole(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline that ran from start to end."""
    output = tmp_path_factory.mktemp("whole")
    finished = run(miniature, output)
    assert finished.exit_code == 0, finished.exception
    lines = finished.stdout.splitlines()
    at = [next(i for i, line in enumerate(lines) if line.startswith(f"[{n}/4] {s}")) for n, s in enumerate(STAGES, 1)]
    assert at == sorted(at)
    assert "[2/4] reader (tune_qa): to do" in lines
    assert lines[-1] == f"all 4 stages are done; the last one left {output / 'more' / 'last'}"
    return output


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """The same in another folder."""
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_each_stage_starts_from_what_the_one_before_left(whole: Path) -> None:
    start, more = (MACModel.from_pretrained(whole / name / "last", device="cpu") for name in ("start", "more"))
    assert start.fingerprint != more.fingerprint
    base_lm = MACModel.from_pretrained(whole / "start" / "last", device="cpu").base_lm.model.state_dict()
    for name, weights in more.base_lm.model.state_dict().items():
        assert weights.equal(base_lm[name])


def killed_run(file: Path, output: Path) -> None:
    """Is killed in step 3 of the first stage that trains MAC, behind its checkpoint of step 2."""
    batch = TrainTask.batch

    def fatal(self: TrainTask, step: int, *rest: Any) -> Any:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(self, step, *rest)

    TrainTask.batch = fatal  # type: ignore[method-assign]
    run(file, output)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_model(miniature: Path, whole: Path, tmp_path: Path) -> None:
    """kill -9 in the third stage."""
    assert run_in_process(killed_run, miniature, tmp_path / "out") == -signal.SIGKILL
    before = times(tmp_path / "out" / "reader")
    resumed = run(miniature, tmp_path / "out")
    assert resumed.exit_code == 0, resumed.exception
    assert (
        "[1/4] lm: done, skipped\n[2/4] reader: done, skipped\n[3/4] start (train): goes on after step 2\n"
        in resumed.stdout
    )
    assert times(tmp_path / "out" / "reader") == before
    for name in STAGES:
        assert metrics(tmp_path / "out" / name) == metrics(whole / name)
    models = [MACModel.from_pretrained(folder / "more" / "last", device="cpu") for folder in (whole, tmp_path / "out")]
    assert models[0].fingerprint == models[1].fingerprint


def test_what_is_done_is_skipped_wherever_the_folder_lies(miniature: Path, copied: Path) -> None:
    before = times(copied)
    again = run(miniature, copied)
    assert again.exit_code == 0, again.exception
    assert [line for line in again.stdout.splitlines() if line.startswith("[")] == [
        f"[{number}/4] {name}: done, skipped" for number, name in enumerate(STAGES, 1)
    ]
    assert times(copied) == before


def test_a_changed_configuration_of_a_done_stage_is_refused(miniature: Path, copied: Path) -> None:
    before = times(copied)
    refused = run(miniature, copied, "--set", "reader.trainer.steps=5", "--set", "reader.trainer.batch_size=3")
    assert isinstance(refused.exception, ConfigError)
    stale = " ".join(str(copied / name) for name in ("reader", "start", "more"))
    differs = "trainer.steps was 4 and is now 5"
    assert f"the stage reader has begun with another configuration: {differs}. " in str(refused.exception)
    assert str(refused.exception).endswith(f"or delete what depends on it: {stale}")
    assert times(copied) == before


def test_a_stage_is_not_redone_under_stages_that_start_from_it(miniature: Path, copied: Path) -> None:
    shutil.rmtree(copied / "reader")
    refused = run(miniature, copied)
    assert isinstance(refused.exception, ConfigError)
    assert str(refused.exception) == (
        "the stage reader is not done, but start, which starts from it, has begun; "
        f"delete {copied / 'start'} {copied / 'more'}"
    )
    assert not (copied / "reader").exists()


def test_a_stage_runs_by_its_own_command_too(miniature: Path, whole: Path, copied: Path) -> None:
    """In the same folder, from the same stage, to the same model; the pipeline then takes it as done."""
    shutil.rmtree(copied / "more")
    done = command("pipelines.train", "--config", f"{miniature}/more", "--output", str(copied / "more"))
    assert done.exit_code == 0, done.exception
    assert metrics(copied / "more") == metrics(whole / "more")
    assert "[4/4] more: done, skipped" in run(miniature, copied).stdout


def test_lexical_vectors_are_a_stage(tmp_path: Path) -> None:
    lexical = {"task": "fit_recency", "start_from": "mac-tiny", "data": {"documents": 30}, "lexical_weight": 0.3}
    file = written(tmp_path, yaml.safe_dump({"stages": {"lexical": lexical}}))
    finished = run(file, tmp_path / "out")
    assert finished.exit_code == 0, finished.exception
    config = MACModel.from_pretrained(tmp_path / "out" / "lexical" / "last", device="cpu").config
    assert (config.lexical_vectors, config.hashed_bm25.weight) == (8, 0.3)
    assert "[1/1] lexical: done, skipped" in run(file, tmp_path / "out").stdout


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RECIPES.glob("*/pipeline.yaml")))
def test_the_pipelines_of_shipped_models_are_whole(name: str) -> None:
    for stage in read_stages(RECIPES / name / "pipeline.yaml"):
        TASK_KINDS[stage.task].config.parse(stage.values, stage.where)


def test_a_value_may_be_set_in_one_stage_or_in_all_that_have_it(miniature: Path) -> None:
    lm, reader, start, more = read_stages(miniature, ["*.trainer.steps=7", "*.data.seed=2", "start.trainer.seed=9"])
    assert [stage.values["trainer"]["steps"] for stage in (lm, reader, start, more)] == [7, 7, 7, 7]
    assert [stage.values.get("data", {}).get("seed") for stage in (lm, reader, start, more)] == [None, 2, 2, 2]
    assert [stage.values["trainer"].get("seed") for stage in (lm, reader, start, more)] == [None, None, 9, 1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps=3", "give STAGE.name=value; the stages of .* are lm, reader, start, more"),
        ("lm=3", "give STAGE.name=value"),
        ("*.trainers.steps=3", "no stage of .* has 'trainers'"),
        ("lm.trainer.stepz=3", r"stage lm is not a valid PretrainConfig:\n  trainer\.stepz.*got 3"),
        ("reader.base_lm.name=${stages.start}/last", "'start', which is no earlier stage; earlier stages are lm"),
    ],
)
def test_a_wrong_override_is_named(miniature: Path, tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raise run(miniature, tmp_path / "out", "--set", override).exception
    assert not (tmp_path / "out").exists()


TRAIN = {"task": "train", "preset": "distilgpt2", "trainer": TRAINER}


def starting(place: str) -> dict[str, Any]:
    return {**TRAIN, "start_from": place}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"a": starting("${stages.b}/last"), "b": TRAIN}, "'b', which is no earlier stage; it is the first"),
        ({"a": TRAIN, "b": starting("${stages.c}/last")}, "'c', which is no earlier stage; .* are a"),
        ({"a": starting("${stages.a}/last")}, "'a', which is no earlier stage"),
        ({"a": TRAIN, "b": starting("${stages.a}/newest")}, "is no reference; write"),
        ({"a": TRAIN, "b": starting("${a}/last")}, "is no reference; write"),
        (
            {"a": {**TRAIN, "task": "distil"}},
            "stage a: give it a task, one of pretrain, tune_qa, tune_reading, train, tune_prior, fit_recency; "
            "it has 'distil'",
        ),
        ({"A B": TRAIN}, "stage A B: a name has lower-case letters"),
        ({}, "it has no stages"),
        ("stages: {a: {task: train}}\n1: 2\nb: 3", "a pipeline has shared and stages, but not 1, b"),
    ],
)
def test_a_pipeline_that_cannot_run_says_why(tmp_path: Path, stages: Any, message: str) -> None:
    text = stages if isinstance(stages, str) else yaml.safe_dump({"stages": stages})
    with pytest.raises(ConfigError, match=message):
        raise run(written(tmp_path, text), tmp_path / "out").exception
    assert not (tmp_path / "out").exists()


def test_unknown_names_list_those_there_are(miniature: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pipeline 'mac-huge': neither a file nor one of mac-small, mac-tiny"):
        raise command("pipelines.run", "mac-huge").exception  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"no recipe 'mac-tiny/trian'.*mac-tiny/train-more"):
        load_recipe(TuneConfig, "mac-tiny/trian", None)
    with pytest.raises(ConfigError, match="holds a pipeline; name one of its stages"):
        load_recipe(TuneConfig, str(miniature), None)


def test_several_processes_are_refused(miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "a pipeline runs in one process" in str(run(miniature, tmp_path).exception)
