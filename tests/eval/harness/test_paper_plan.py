"""The steps of `eval.paper`: one for every experiment, on the data sets that are there, with options that exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import typer

from eval.harness.paper_plan import DATASETS, PLANS, steps
from eval.harness.scales import SCALES, Scale
from eval.report.catalogue import CATALOGUE
from mac_rag.errors import ConfigError


def folders(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
    return path


def test_every_experiment_has_a_place_in_the_report_and_a_step() -> None:
    assert {entry.experiment for entry in PLANS} == {experiment.name for experiment in CATALOGUE}


def test_the_tiny_scale_needs_no_data_for_any_experiment_but_those_of_a_data_set() -> None:
    planned = steps("tiny", None, 0)
    assert [step.name for step in planned if step.missing and "-" not in step.name] == ["squad", "streamingqa"]
    assert sum(step.minutes or 0 for step in planned if not step.missing) <= 45


def test_data_sets_in_the_folder_add_their_steps(tmp_path: Path) -> None:
    ready = [step for step in steps("tiny", folders(tmp_path, "squad"), 0) if not step.missing]
    added = {step.name for step in ready} - {step.name for step in steps("tiny", None, 0) if not step.missing}
    assert added == {"squad", "main_table-squad", "retention-squad", "ood-squad"}
    for step in ready:
        assert (str(tmp_path / "squad") in step.arguments) == (step.name in added)


def test_the_papers_scale_runs_on_its_data_sets_only(tmp_path: Path) -> None:
    assert all(step.missing for step in steps("paper", None, 0))
    planned = steps("paper", folders(tmp_path, *DATASETS), 0)
    assert not any(step.missing for step in planned)
    assert all("--data" in step.arguments for step in planned)
    assert {f"main_table-{name}" for name in DATASETS} <= {step.name for step in planned}


@pytest.mark.parametrize("scale", SCALES)
def test_names_are_unique_and_options_exist(tmp_path: Path, scale: Scale) -> None:
    planned = steps(scale, folders(tmp_path, *DATASETS), 3)
    assert len({step.name for step in planned}) == len(planned)
    for step in planned:
        app = typer.Typer()
        app.command()(importlib.import_module(f"eval.{step.experiment}").main)
        command = typer.main.get_command(app)
        arguments = list(step.command(tmp_path)[1:])
        command.make_context(step.name, list(arguments))  # stops at what the command would refuse
        assert arguments[arguments.index("--seed") + 1] == "3"


def test_a_folder_without_any_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of the folders streamingqa, squad, archivalqa"):
        steps("tiny", tmp_path, 0)
