"""Runs all stages of a pipeline in order: `python -m pipelines.run --help`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from pipelines.stages import RECIPES, Stage, pipeline_file, read_stages

if TYPE_CHECKING:
    from mac_rag.config import Config


def main(
    pipeline: Annotated[str, typer.Argument(help="A pipeline file, or the name of a shipped model, such as mac-tiny.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder with one folder per stage; stages that are done are skipped.", show_default="runs/NAME"
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the stages and their state, and run nothing.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Overrides one value of a stage, e.g. --set memory.trainer.steps=100. `*` stands for all stages that "
            "have the value, e.g. `--set '*.data.path=folder'`.",
        ),
    ] = None,
) -> None:
    """Train a model stage by stage: skip stages that are done, and resume the one that was interrupted.

    If the command is stopped or killed, run it again: the training resumes with the same losses. A single stage:
    `python -m pipelines.train --config NAME/STAGE --output runs/NAME/STAGE`.
    """
    from mac_rag.errors import ConfigError

    path = pipeline_file(pipeline)
    if path is None:
        known = sorted(file.parent.name for file in RECIPES.glob("*/pipeline.yaml"))
        raise ConfigError(f"no pipeline {pipeline!r}: neither a file nor one of {', '.join(known)}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "a pipeline runs in one process; for several, run each stage with torchrun -m pipelines.train"
        )
    folder = output or Path("runs") / (path.parent.name if path.stem == "pipeline" else path.stem)
    runs = plan(read_stages(path, set_ or ()), folder)
    if list_:
        for run in runs:
            say(f"{run.title} ({run.stage.task}): {run.state}")
        return
    check(runs)
    for run in runs:
        run_stage(run)
    say(f"all {len(runs)} stages are done; the last one left {runs[-1].folder / 'last'}")


@dataclass(frozen=True)
class StageRun:
    """A stage in the folder of its pipeline, with its validated recipe and its place, counted from 1."""

    stage: Stage
    number: int
    count: int
    recipe: Config
    folder: Path

    @property
    def title(self) -> str:
        return f"[{self.number}/{self.count}] {self.stage.name}"

    @property
    def done(self) -> bool:
        """True if the stage is complete: a task writes `last/` at its end."""
        return (self.folder / "last").exists()

    @property
    def changes(self) -> list[str]:
        """Differences between its recipe and that of the run in its folder."""
        from pipelines.recipe import changes_since
        from pipelines.tasks.registry import kept_values

        return changes_since(self.folder, kept_values(self.stage.task, self.recipe))

    @property
    def state(self) -> str:
        from pipelines.checkpoints import finished_steps
        from pipelines.training_task import TrainingRecipe

        if self.changes:
            return f"begun with another configuration: {'; '.join(self.changes)}"
        if self.done:
            return "done"
        if not isinstance(self.recipe, TrainingRecipe) or not self.folder.exists():
            return "to do"
        return f"step {finished_steps(self.folder)} of {self.recipe.trainer.steps}"


def plan(stages: Sequence[Stage], folder: Path) -> list[StageRun]:
    """The stages with their recipes, which are all validated before any stage runs.

    Raises:
        ConfigError: for an invalid recipe; it names the stage.
    """
    from pipelines.tasks.registry import TASK_KINDS

    return [
        StageRun(
            stage,
            number,
            len(stages),
            TASK_KINDS[stage.task].config.parse(stage.values, stage.where),
            folder / stage.name,
        )
        for number, stage in enumerate(stages, 1)
    ]


def check(runs: Sequence[StageRun]) -> None:
    """Checks that the runs in the folder belong to this pipeline.

    Raises:
        ConfigError: for a stage that has begun with another configuration, or before a stage that it starts from was
            done; it names the folders to delete.
    """
    from mac_rag.errors import ConfigError

    for run in runs:
        later = [other for other in _built_on(run, runs) if other.folder.exists()]
        if run.changes:
            stale = " ".join(str(other.folder) for other in (run, *later))
            raise ConfigError(
                f"{run.title} has begun with another configuration: {'; '.join(run.changes)}. Undo the change, choose "
                f"another --output, or delete what depends on it: {stale}"
            )
        if later and not run.done:
            stale = " ".join(str(other.folder) for other in later)
            raise ConfigError(
                f"{run.title} is not done, but {later[0].stage.name}, which starts from it, has begun; delete {stale}"
            )


def run_stage(run: StageRun) -> None:
    """Runs a stage unless it is done, with a message."""
    from pipelines.tasks.registry import run_task

    if run.done:
        say(f"{run.title}: done, skipped")
        return
    say(f"{run.title} ({run.stage.task}): {run.state}")
    began = time.perf_counter()
    run_task(run.stage.task, run.recipe, run.folder, run.title)
    say(f"{run.title}: done after {(time.perf_counter() - began) / 60:.1f} minutes")


def _built_on(run: StageRun, runs: Sequence[StageRun]) -> list[StageRun]:
    """The later stages that start from a stage, directly or through others."""
    names = {run.stage.name}
    later = []
    for other in runs[run.number :]:
        if other.stage.starts_from & names:
            names.add(other.stage.name)
            later.append(other)
    return later


if __name__ == "__main__":
    run_command(main)
