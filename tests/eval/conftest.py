"""Running the evaluation commands as their users do, inside the test process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from eval.harness.results import Result
from mac_rag.cli.run import run_command
from tests.eval.helpers import Command, Evaluate, Evaluated


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `python -m <module> <arguments>` in an empty folder; gives exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(module: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command(importlib.import_module(module).main)
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture
def evaluate(command: Command, tiny_checkpoint: Path, tmp_path: Path) -> Evaluate:
    """Runs an experiment to its end, on the tiny model unless another one is named; gives what it wrote and printed."""

    def run(experiment: str, *arguments: object, model: object = tiny_checkpoint) -> Evaluated:
        code, shown, errors = command(f"eval.{experiment}", *arguments, "--model", model, "--output", "r.json")
        assert code == 0, errors
        result = Result.read(tmp_path / "r.json")
        rows = {row.name: row for row in result.rows}
        return Evaluated(result, rows, result.read_samples(tmp_path / "r.json"), shown)

    return run


@pytest.fixture
def few_stories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of variants read 64 stories, which are written in a moment."""
    monkeypatch.setattr("eval.harness.variants.STORIES", 64)
