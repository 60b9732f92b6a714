"""Runs all stages of a pipeline in order: `python -m pipelines.run --help`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
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
    from pipelines.checkpoints import finished_steps
    from pipelines.tasks.registry import TASK_KINDS, run_task

    path = pipeline_file(pipeline)
    if path is None:
        known = sorted(file.parent.name for file in RECIPES.glob("*/pipeline.yaml"))
        raise ConfigError(f"no pipeline {pipeline!r}: neither a file nor one of {', '.join(known)}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "a pipeline runs in one process; for several, run each stage with torchrun -m pipelines.train"
        )
    folder = output or Path("runs") / (path.parent.name if path.stem == "pipeline" else path.stem)
    stages = read_stages(path, set_ or ())
    recipes = [TASK_KINDS[stage.task].config.parse(stage.values, stage.where) for stage in stages]
    check(stages, recipes, folder)
    for number, (stage, recipe) in enumerate(zip(stages, recipes, strict=True), 1):
        title = f"[{number}/{len(stages)}] {stage.name}"
        if is_done(folder / stage.name):
            say(f"{title}: done, skipped")
            continue
        steps = finished_steps(folder / stage.name)
        say(f"{title} ({stage.task}): {f'goes on after step {steps}' if steps else 'to do'}")
        began = time.perf_counter()
        run_task(stage.task, recipe, folder / stage.name, title)
        say(f"{title}: done after {(time.perf_counter() - began) / 60:.1f} minutes")
    say(f"all {len(stages)} stages are done; the last one left {folder / stages[-1].name / 'last'}")


def is_done(folder: Path) -> bool:
    """True if the stage of a folder is complete: a task writes `last/` at its end."""
    return (folder / "last").exists()


def check(stages: Sequence[Stage], recipes: Sequence[Config], folder: Path) -> None:
    """Checks that the runs in the folder of a pipeline belong to it, before any stage runs.

    Raises:
        ConfigError: for a stage that has begun with another configuration, or before a stage that it starts from was
            done; it names the folders to delete.
    """
    from mac_rag.errors import ConfigError
    from pipelines.recipe import changes_since
    from pipelines.tasks.registry import kept_values

    for number, (stage, recipe) in enumerate(zip(stages, recipes, strict=True)):
        built_on = {stage.name}
        later = []
        for other in stages[number + 1 :]:
            if other.starts_from & built_on:
                built_on.add(other.name)
                later += [folder / other.name] if (folder / other.name).exists() else []
        if changes := changes_since(folder / stage.name, kept_values(stage.task, recipe)):
            stale = " ".join(map(str, (folder / stage.name, *later)))
            raise ConfigError(
                f"the stage {stage.name} has begun with another configuration: {'; '.join(changes)}. Undo the change, "
                f"choose another --output, or delete what depends on it: {stale}"
            )
        if later and not is_done(folder / stage.name):
            stale = " ".join(map(str, later))
            raise ConfigError(
                f"the stage {stage.name} is not done, but {later[0].name}, which starts from it, has begun; delete "
                f"{stale}"
            )


if __name__ == "__main__":
    run_command(main)
